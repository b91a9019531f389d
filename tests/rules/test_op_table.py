"""One table of what is known of an op: all that is registered lies in it, and nothing else keeps one of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from psg_fx import cli, op_table
from psg_fx.errors import BadArgument, InternalError
from psg_fx.explain import ops
from psg_fx.op_table import COLUMNS, SampleRule, Strides, changed, enter, known

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p for folder in ("psg_fx", "passes") for p in (ROOT / folder).rglob("*.py"))
DECORATORS = {"rule", "class_rule", "sample_rule"} | {
    "formula", "prefix_formula", "decomposition", "at_capture", "under_autograd", "over_kept_rows", "bounded",
}  # fmt: skip

OTHER_TABLES = {
    "passes/capture/functions/in_bulk.py:_CALLED": "what a function of lists does to each tensor, under another name",
    "passes/capture/fills.py:_FILLS": "ops that fill, and what fills by itself, asked by one rewriting",
    "passes/capture/rolled.py:_BY_FORMULA": "what vmap would call once for each turn of a loop",
    "passes/capture/taken_apart.py:JOINING": "what puts values together, asked by rewritings of what was taken apart",
    "passes/capture/taken_apart.py:_SPLITS": "what takes a value apart, asked by one rewriting",
    "passes/independence/ragged/pointers.py:_VIEWS": "ops whose results hold entries of an input as they lie",
    "passes/independence/ragged/pointers.py:_NO_PLACE": "comparisons, and the last number that says nothing of places",
    "passes/independence/ragged/pointers.py:_CHOICES": "ops that give one of the places that they are given",
    "passes/rules/fallback.py:_ALONG": "ops of one form of arguments, which the fallback reads",
    "psg_fx/torch_private/tensor_parallel.py:_OF_LAYERS": "functions that parallel layers call",
    "passes/compile/convolutions.py:_WAYS": "the convolutions that a matrix unit may compute, a question of one pass",
    "passes/compile/joins.py:_JOINS": "the two ops that lay parts side by side, and those that do it by torch",
    "psg_fx/graph/finite.py:_SOFTMAX": "what makes a zero of an infinity, asked where the code masks by one",
    "psg_fx/graph/finite.py:_APART_FROM_ZERO": "ops that are finite apart from zero, asked by one function",
    "psg_fx/graph/ranges.py:_OF": "ranges that follow from an op alone, read by one function",
    "psg_fx/graph/ranges.py:_PASS": "ops that give the numbers that they are given",
    "psg_fx/graph/squeezes.py:_SQUEEZES": "an op and its copying form, whose arguments are read",
    "psg_fx/op_table.py:_ROWS": "the table",
    "psg_fx/torch_private/tracer.py:READING": "what reads a number, asked for while code is traced, and of a graph",
    "psg_fx/torch_private/functional.py:_SIZES": "what a trace knows of a tensor without an op",
    "psg_fx/ops/define.py:_OF_TORCH": "what stands for ops of psg_fx in a file, said where they are defined",
    "psg_fx/ops/define.py:_LAYOUTS": "how arguments of ops of psg_fx lie, said where they are defined",
    "psg_fx/ops/define.py:_LIBRARIES": "libraries in C++ that ops of psg_fx call, said where they are defined",
    "psg_fx/ops/recurrent/layers.py:_NONLINEAR": "kinds of cells",
    "psg_fx/ops/recurrent/layers.py:_GRADIENTS": "kinds of cells",
    "psg_fx/ops/recurrent/of_parameters.py:_STATES": "kinds of cells",
    "passes/independence/rules/windows.py:_TRANSPOSED": "ops of one rule, which it tells apart",
    "passes/independence/rules/along.py:_DONE": "words for refusals",
    "passes/independence/rewriting/counts.py:_FILLS": "what rows are counted by",
    "passes/independence/rewriting/reordered.py:_SORTS": "the ops that put rows in an order, asked by one rewriting",
    "passes/independence/rewriting/reordered.py:_WRITES": "the ops that put rows back",
    "passes/independence/rewriting/reordered.py:_ADDS": "the ops that put rows back",
    "passes/independence/rewriting/reordered.py:_SYMMETRIC": "the ops that do not know the order of rows",
    "passes/independence/rewriting/listed.py:_FILLS": "the forms of an op that writes one number by places",
    "passes/independence/rewriting/listed.py:_SAME": "the ops that give a list of places in one dim again",
    "passes/independence/rewriting/whole_rows.py:_ROWS": "the ops that put numbers in rows",
    "passes/independence/rewriting/whole_rows.py:_SAME": "the ops that give the same mask again",
    "passes/independence/rewriting/whole_rows.py:_WIDER": "the ops that make a mask the same along a dim",
    "passes/independence/rewriting/selected.py:_FLAT": "the ops that make one column of a list of places",
    "psg_fx/program/decisions/alike_masks.py:_LISTING": "functions that list where a mask is true, called by users",
    "passes/capture/emptied.py:LISTING": "the ops that list where a mask is true, asked by two readings of a graph",
    "passes/capture/emptied.py:PICKS": "the ops that pick rows",
    "passes/capture/read_numbers.py:_OF_NUMBERS": "what Python computes of numbers, and what does of tensors",
    "passes/capture/read_numbers.py:_WITH_TENSORS": "the ops on a tensor and a number, and those on two tensors",
    "passes/capture/emptied.py:_PUTS": "the ops that put rows back",
    "passes/capture/emptied.py:_PUTS_BY_NUMBER": "the ops that put rows back",
    "passes/capture/emptied.py:_NOT": "what makes zeros of ones",
    "passes/capture/emptied.py:_AND": "what makes zeros of zeros and anything",
    "passes/capture/emptied.py:_OR": "what leaves alone what is joined with zeros",
    "passes/capture/emptied.py:_KEEP_ZERO": "what makes zeros of zeros",
    "passes/capture/emptied.py:_DENSE": "ops of one form of arguments, which the reading binds",
    "psg_fx/program/decisions/told.py:_ASKED_OF_MASKS": "what functions say of a mask that picks nothing",
    "psg_fx/program/decisions/told.py:_OF_BOOLS": "which of these say so of masks alone",
    "psg_fx/program/decisions/told.py:_PICKS": "the functions that pick rows",
    "psg_fx/program/decisions/told.py:_LISTING": "the functions whose rows are as many as a mask picks",
    "psg_fx/graph/written_copies.py:_NEW": "what shares memory, by its shapes, that nothing else has",
    "psg_fx/program/decisions/told.py:COMPARED": "operators by the names of functions",
    "psg_fx/program/decisions/told.py:_SAME": "what says the same of a mask as what it is given",
    "psg_fx/program/decisions/told.py:_SAME_LIST": "what lists the same indexes",
    "psg_fx/program/decisions/told.py:_TURNED": "what puts the dims of a mask in another order",
    "psg_fx/program/decisions/told.py:_TOLD_BY": "all of these",
    "psg_fx/program/decisions/equal_picks.py:_PUT": "what puts rows into samples again",
    "passes/independence/rewriting/grids.py:_LOOKUPS": "the ops that look an image up, which a rewriting is for",
    "passes/independence/rewriting/picked.py:LISTS": "the ops that list where a mask is true",
    "passes/independence/rewriting/selected.py:_INDEX": "the ops that pick rows",
    "passes/independence/rewriting/selected.py:_PUT": "the ops that put rows back",
    "passes/alone/calls.py:_SQUEEZES": "functions by name, for code that is run on one sample",
    "passes/alone/memory.py:_NEW": "what a run of code makes, without an op that says so",
    "passes/alone/memory.py:_OVERWRITES": "the ops that read nothing of what they write into",
    "passes/capture/sizes_read.py:_SQUEEZES": "the ops that take dims of size 1",
    "psg_fx/torch_private/ops.py:MAY_COPY": "ops and functions by name, for two runs of code",
    "passes/independence/ragged/alone.py:_BY_ELEMENT": "ops by elements without the tag, for what a sample alone has",
    "passes/independence/ragged/alone.py:_COMPARED": "the comparisons of places, a question of one walk",
    "passes/independence/ragged/alone.py:_CUTS": "what cuts places along other dims, the same",
    "passes/independence/ragged/alone.py:_SEARCHED": "what finds ids from offsets, the same",
    "passes/independence/rules/indexing.py:_AS_IT_IS": "what leaves the numbers of rows as they are",
    "passes/independence/ragged/parts.py:_DECIDES": "what masks of pairs are between samples, the same",
    "passes/independence/ragged/parts.py:_IGNORES": "the same, of reductions",
    "passes/independence/ragged/links.py:READS": "the ops that join rows by a pointer, a question of one walk",
    "passes/independence/ragged/links.py:WRITES": "the same of those that write",
    "passes/independence/ragged/links.py:_COUNTING_BACK": "which of these take negative pointers",
    "passes/independence/rewriting/parts.py:NEW": "the ops that read a dtype off a value, asked by one rewriting",
    "passes/independence/rewriting/parts.py:_FILLS": "the ops that make rows which are all the same",
    "passes/independence/rewriting/writes.py:_PUTS": "the ops that add rows elsewhere, asked by one rewriting",
    "passes/independence/rewriting/writes.py:_WRITES": "the ops that add rows elsewhere",
    "passes/independence/rewriting/writes.py:_REDUCED": "in which ways they do",
    "passes/independence/ragged/row_values.py:_ROW_BY_ROW": "what numbers of rows may go through",
    "passes/independence/ragged/pairs.py:_MATMULS": "the ops of attention that is written out, and sums by a mask",
    "passes/independence/ragged/pairs.py:_PRODUCTS": "the ops of attention that is written out",
    "passes/independence/ragged/pairs.py:_KEEP_ZEROS": "the ops of attention that is written out",
    "passes/independence/ragged/pairs.py:_QUOTIENTS": "the ops of attention that is written out",
    "passes/independence/bounds.py:_WITH_PLACES": "which of several results a bound is of",
    "passes/independence/bounds.py:_PARTS": "which of several results a bound is of",
    "passes/compile/contiguous.py:_PRODUCTS": "which ops the BLAS computes, a question of one pass",
    "passes/independence/ragged/pairs.py:_SOFTMAX": "the ops of attention that is written out",
    "passes/independence/ragged/pairs.py:_BY_ENTRY": "the ops of attention that is written out",
    "passes/capture/gradients/twice_differentiable.py:_KEEP_STATISTICS": "ops that are written in others, by one pass",
    "passes/capture/gradients/twice_differentiable.py:FORMULAS": "ops that are written in others, by one pass",
    "passes/capture/gradients/twice_differentiable.py:_SEVERAL": "which results have gradients, a question of one pass",
    "passes/widen.py:_INTO": "overloads of two ops",
    "passes/totals/weighted.py:_KEPT": "which results are stored in any case, a question of one pass",
    "psg_fx/graph/nodes.py:_FILLS": "the ops that fill with a number",
    "passes/statistics.py:_AFFINE": "three ops, and where their weights are",
    "passes/beside.py:_OF_MATRICES": "overloads of two ops",
    "passes/beside.py:_BATCHED": "overloads of one op",
    "passes/beside.py:_WRITTEN": "what plans write for their products",
    "passes/beside.py:_INLINE": "what plans read where it is made",
    "psg_fx/ops/recurrent/layers.py:LOOPS": "how ops of psg_fx are computed, for those that do the same in C++",
    "psg_fx/ops/recurrent/cells.py:LOOPS": "how ops of psg_fx are computed, for what counts their calls",
    "passes/compile/recurrences.py:_OWN": "tables of ops, by the kind of device that they are for",
    "psg_fx/planner/expr.py:_IDS": "parts of trees",
    "psg_fx/graph/stages.py:_CHECKS[stage]": "promises of stages",
    "psg_fx/torch_private/composites.py:_KERNELS": "kernels of torch that are put back",
    "psg_fx/torch_private/fake_keys.py:_FUNCTIONS": "what torch's tags and schemas say, asked once",
    "psg_fx/torch_private/fake_keys.py:_LEFT": "what torch computes fast, or from more than a key holds",
    "psg_fx/torch_private/recorded.py:_LEFT": "what make_fx records in a way of its own",
}
"""Containers of ops that are no tables of what is known of them."""


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def decorated() -> Iterator[tuple[str, str]]:
    """`file:line` and decorator of every function that fills a cell."""
    for path in FILES:
        for node in ast.walk(parsed(path)):
            for decorator in getattr(node, "decorator_list", []):
                name = ast.unparse(getattr(decorator, "func", decorator))
                if name.rpartition(".")[2] in DECORATORS:
                    first = node.decorator_list[0].lineno
                    yield f"{path.relative_to(ROOT)}:{first}", name


def test_every_registered_function_is_shown() -> None:
    shown = {cell.where for cell in ops.cells_of()}
    found = dict(decorated())
    assert len(found) > 150
    assert set(found.values()) == DECORATORS
    assert not {f"{name} at {where}" for where, name in found.items() if where not in shown}


def test_every_row_is_shown() -> None:
    shown = {cell.op for cell in ops.cells_of()}
    assert shown == {op_table.printed(key) for key in op_table.rows()}
    assert len(shown) == len(op_table.rows())


def test_every_column_is_in_use() -> None:
    """But for the word of the user."""
    said = {c.name for c in COLUMNS for row in op_table.rows().values() if getattr(row, c.name)}
    assert said | {"trusted"} == {c.name for c in COLUMNS}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_where_a_column_is_written_is_true(column) -> None:
    """Where the function of a cell lies, or `enter` is called."""
    found = {e.where.partition(":")[0] for e in ops.cells_of() if e.what == column.metadata["title"]}
    by = column.metadata["by"]
    places = [word for word in by.replace(",", " ").split() if word.startswith(("passes/", "psg_fx/"))]
    if "enter(" in by:
        assert f"{column.name}=" in (ROOT / places[0]).read_text(encoding="utf-8").replace(f".., {column.name}=", "")
    elif column.name not in ("trusted", "under_autograd"):
        assert {where for where in found if not where.startswith((*places, "torch/"))} == set()


def _ops_in(node: ast.expr) -> int:
    """How many ops a literal names, as themselves or by their names alone."""
    names = [ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    words = [str(item.value).removeprefix("aten.") for item in items if isinstance(item, ast.Constant)]
    by_name = len(words) if all(hasattr(aten, word) for word in words) else 0
    return by_name + sum(name.startswith(("aten.", "torch.ops.")) for name in names)


def containers() -> Iterator[str]:
    """`file:name` of every container at the top of a module that names ops, or is filled by a function given an op."""
    for path in FILES:
        module = parsed(path)
        for node in module.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
            name = ast.unparse(target)
            literal = isinstance(node.value, (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.Call))
            filled = _ops_in(node.value) if literal else 0
            keyed = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith(("dict[Op", "dict[Any"))
            if filled > 1 or (keyed and ast.unparse(node.value) == "{}"):
                yield f"{path.relative_to(ROOT)}:{name}"


def registering() -> Iterator[str]:
    """`file:name` of every container at the top of a module that a decorator fills."""
    for path in FILES:
        module = parsed(path)
        tops = {ast.unparse(t) for n in module.body if isinstance(n, ast.Assign) for t in n.targets}
        tops |= {ast.unparse(n.target) for n in module.body if isinstance(n, ast.AnnAssign)}
        for outer in (n for n in module.body if isinstance(n, ast.FunctionDef)):
            for inner in (n for n in ast.walk(outer) if isinstance(n, ast.FunctionDef) and n is not outer):
                for node in ast.walk(inner):
                    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                        name = ast.unparse(node.value)
                    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                        name = ast.unparse(node.func.value) if node.func.attr in ("append", "add", "update") else ""
                    else:
                        continue
                    if name.partition("[")[0] in tops:
                        yield f"{path.relative_to(ROOT)}:{name}"


def test_nothing_else_keeps_a_table_of_ops() -> None:
    found = set(containers()) | set(registering())
    assert found == set(OTHER_TABLES)


def test_a_cell_is_filled_once() -> None:
    with pytest.raises(InternalError, match=r"aten\.linear has its sample rule already: linear, and now <lambda>"):
        enter("linear", samples=SampleRule(lambda op: None, "view"))
    with pytest.raises(InternalError, match=r"aten\.view\.default has its reads strides already"):
        enter(aten.view.default, strides=Strides.ROW)


def test_an_overload_says_more_than_its_op() -> None:
    samples = known(aten.max.dim).samples
    assert known(aten.max.other).samples is not samples
    assert known(aten.linear.default).gradient is not None
    assert known(aten.linear.default).samples is op_table.row("linear").samples is op_table.row("aten::linear").samples
    assert known(aten.linear.out).gradient is None


def test_names_of_nodes_are_no_ops() -> None:
    """The target of a placeholder is its name, which may be that of an op."""
    assert known("view.default") == known(len) == op_table.Known()


def test_a_change_lasts_for_a_while() -> None:
    before, rows = known(aten.linear.default), dict(op_table.rows())
    with changed("linear", "no_such_op", samples=None):
        enter("another", selects=True)
        assert known(aten.linear.default).samples is None
        assert known(aten.linear.default).gradient is before.gradient
    assert known(aten.linear.default) == before
    assert op_table.rows() == rows


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("linear", ["aten.linear.default", "for weight (argument 1), bias (argument 2)", "passes/rules/linear.py:"]),
        ("aten::cat", ["aten.cat", "same op, along dim + 1", "vmap(vjp) of the op, which materialises"]),
        ("torch.ops.aten.slice.Tensor", ["aten.slice.Tensor", "in_other_ops.py:", "proof: view, sizes, index"]),
        ("relu", ["relu is one of <pointwise>", "passes/rules/pointwise.py:"]),
        ("F.ctc_loss".removeprefix("F."), ["torch.nn.functional.ctc_loss", "passes/capture/functions/rewrites.py:"]),
        ("psg_fx::attach", ["psg_fx.attach.default", "psg_fx/ops/recurrent/layers.py:"]),
        ("linalg_solve", ["sample rule: solve, proof: trailing dims"]),
        ("trapezoid_like_op_that_is_not", []),
        ("convolution_overrideable", ["refused where samples reach it"]),
        ("psg_fx::grouped_weight_gradient", ["refused where samples reach it, unless the user trusts it"]),
        ("special_i0e", ["is one of <pointwise>"]),
        ("as_strided", ["what it means depends on strides: refused", "psg_fx/graph/strides.py"]),
    ],
)  # fmt: skip
def test_what_is_known_of_an_op(name: str, wanted: list[str]) -> None:
    if not wanted:
        with pytest.raises(BadArgument, match="there is no op"):
            ops.known_of(name)
        return
    text = ops.known_of(name)
    assert [part for part in wanted if part not in text] == [], text


def test_an_op_composed_of_others_needs_no_sample_rule() -> None:
    with changed("softmax", samples=None):
        assert "written out in the ops that it is composed of" in ops.known_of("softmax.int")


def test_the_user_s_word_is_shown() -> None:
    with changed("mylib::op", trusted=True):
        assert "trusted by the user: yes" in ops.known_of("mylib::op")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "linear"]) == 0
    assert "gradient rule: linear" in capsys.readouterr().out
    assert cli.main(["ops"]) == 0
    assert f"of {len(op_table.rows())} ops" in capsys.readouterr().out
    assert cli.main(["ops", "linear", "--json"]) == 0
    assert '"what": "gradient rule"' in capsys.readouterr().out
    assert cli.main(["ops", "lineal"]) == 2
    assert "did you mean linear" in capsys.readouterr().err


def test_the_page_names_every_column() -> None:
    text = (ROOT / "docs" / "add-an-op.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for column in COLUMNS:
        (row,) = [line for line in rows if line.startswith(f"| {column.metadata['title']} |")]
        by, places = column.metadata["by"].partition(" in ")[::2]
        assert by.partition(",")[0] in row if by.startswith("@") else f"`{by}`" in row
        assert places.split(" ")[0].strip(",") in row
