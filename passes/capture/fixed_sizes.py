"""One graph from captures at fixed batch sizes, where a capture with a symbolic batch size fails.

The program is captured at the batch size of the call, at a prime, and at one.  All must be the same graph but for
numbers that are multiples c·B of the batch size (or c/B); these become symbols again, so that samples are proven apart
as ever.  The graph then serves the one batch size it was captured at: another one may lead the code elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported, PsgError, first_line
from psg_fx.graph import facts
from psg_fx.graph.history import copy_graph
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.program.decisions.branches import no_plain_batch_size
from psg_fx.source import locate
from psg_fx.torch_private.fakes import sizes_made, symbolic_inputs
from psg_fx.torch_private.functional import Functional
from psg_fx.torch_private.modes import enable_python_dispatcher

from ..independence.arguments import bound
from .constants import Elements, Share, alike, compute, number, same_constants, share
from .one_form import are_longer, in_one_form, without_copies

aten = torch.ops.aten


def join(
    graphs: Sequence[GraphModule], sizes: Sequence[int], tensors: Sequence[torch.Tensor], dims: Sequence[int | None],
    constants: Mapping[str, Elements],
) -> tuple[GraphModule, str]:  # fmt: skip
    """The first graph, its numbers that go with the batch size replaced by a symbol; and the line of a loop over the
    samples, if there was one.

    graphs: captures of one program at `sizes`.  tensors: what the placeholders of the first hold.  dims: where the
    samples lie in them, None where there are none.  constants: those of `constants_that_follow`.
    """
    first = graphs[0]
    loop = in_one_form(graphs, sizes)
    columns = list(zip(*(g.graph.nodes for g in graphs), strict=False))
    if are_longer(graphs):
        raise _unlike(next((c[0] for c in columns if len({n.target for n in c}) > 1), columns[-1][0]), sizes)
    place = [{n: i for i, n in enumerate(g.graph.nodes)} for g in graphs]
    shares = [_compare(column, place, sizes) for column in columns]
    batch = _write(first, shares, dims)
    for node in [n for n in first.graph.nodes if n.op == "placeholder" and n.name in constants]:
        compute(first, batch, node, constants[node.name])
    _describe(first, tensors, dims)
    return first, loop


def same_program(one: Functional, other: Functional) -> bool:
    """Whether two captures compute the same, copies aside."""
    both = [copy_graph(found.graph_module) for found in (one, other)]
    for gm in both:
        without_copies(gm)
    return same_graph(*both) and same_constants((one, other))


def same_graph(one: GraphModule, other: GraphModule) -> bool:
    """Whether two captures at one batch size are the same, node for node."""
    if are_longer((one, other)):
        return False
    nodes = [list(gm.graph.nodes) for gm in (one, other)]
    place = [{n: i for i, n in enumerate(each)} for each in nodes]
    try:
        return not any(
            isinstance(v, Share) for column in zip(*nodes, strict=True) for v in _compare(column, place, (1, 1))
        )
    except NotYetSupported:
        return False


def values_of(exported: Functional, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each placeholder holds."""
    given, found = iter(inputs), []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            found.append(next(given))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            found.append(exported.constants[spec.target or ""])
        else:
            value = exported.state_dict.get(spec.target or "")
            found.append(exported.constants[spec.target or ""] if value is None else value)
    return [v.detach() for v in found]


def _compare(column: Sequence[Node], place: Sequence[dict[Node, int]], sizes: Sequence[int]) -> list[Any]:
    """The flat arguments of a node, a `Share` where they go with the batch size."""
    first = column[0]
    if len({n.op for n in column}) > 1 or (first.op == "call_function" and not _one_target([n.target for n in column])):
        raise _unlike(first, sizes)
    flat = [pytree.tree_leaves((n.args, n.kwargs)) for n in column]
    if len({len(f) for f in flat}) > 1:
        for node in column:
            _with_defaults(node)
        flat = [pytree.tree_leaves((n.args, n.kwargs)) for n in column]
    if len({len(f) for f in flat}) > 1:
        raise _unlike(first, sizes)
    return [_argument(first, values, place, sizes) for values in zip(*flat, strict=True)]


def _with_defaults(node: Node) -> None:
    """All arguments of an op: export leaves out those that are the default, as one group for one sample."""
    if isinstance(node.target, OpOverload):
        full = bound(node)
        only = [a.name for a in node.target._schema.arguments if a.kwarg_only]
        node.args = tuple(value for name, value in full.items() if name not in only)
        node.kwargs = {name: full[name] for name in only}


def _one_target(targets: Sequence[Any]) -> bool:
    """Whether these are one op.  A custom autograd function is another op in each capture."""
    calls = [call.fixed for call in map(custom_call, targets) if call]
    if len(calls) < len(targets):
        return len(set(targets)) == 1
    return len({len(call) for call in calls}) == 1 and all(map(alike, zip(*calls, strict=True)))


def _argument(node: Node, values: Sequence[Any], place: Sequence[dict[Node, int]], sizes: Sequence[int]) -> Any:
    if all(isinstance(v, Node) for v in values):
        if len({p[v] for p, v in zip(place, values, strict=True)}) == 1:
            return values[0]
        raise _unlike(node, sizes)
    if any(isinstance(v, Node) for v in values):
        raise _unlike(node, sizes)
    if alike(values):
        return values[0]
    found = share(values, sizes, 1e-12)
    if found is not None:
        return found
    raise NotYetSupported(
        f"{node.target} has a number that follows the batch size in no simple way", where=locate(node),
        why=f"it is {', '.join(f'{v} at B = {s}' for v, s in zip(values, sizes, strict=True))}",
        fix="use x.shape[0] itself, without //, int(), min() or max(), and torch.arange(x.shape[0]) * n to number "
        "rows; what samples have in common (draws for pairs of them, times spread over the batch) is made outside, and "
        "passed in",
    )  # fmt: skip


def _one_number(node: Node) -> NotYetSupported:
    return NotYetSupported(
        f"{node.target} takes no symbol for the batch size", where=locate(node),
        why="torch asks for the number itself to say what it makes, so its samples cannot be proven apart",
        fix="if it runs over the samples, let it not; else write it with ops that take any size",
    )  # fmt: skip


def _no_sizes(node: Node, error: Exception) -> NotYetSupported:
    """Torch fails with the symbol, in whatever way."""
    counts = node.target is aten._assert_scalar.default
    return NotYetSupported(
        f"{node.target} cannot be worked out for a batch of any size", where=locate(node),
        why="how many places a mask picks is held against a size that follows the batch size" if counts
        else f"{type(error).__name__}: {first_line(error)}",
        fix="keep every place, and mask what is computed of them by torch.where" if counts
        else "write it with ops that take any size",
    )  # fmt: skip


def _unlike(node: Node, sizes: Sequence[int]) -> NotYetSupported:
    listed = ", ".join(str(s) for s in sizes)
    return NotYetSupported(
        "the program is another one for another batch size", where=locate(node),
        why=f"captured with {listed} samples it gives graphs that differ here, and the loss of a sample is that of a "
        "batch of one",
        fix="write it to do the same for every batch size, without a branch on it; in a loop over samples let every "
        "turn do the same with its own row, and put all together (torch.stack), or call torch.vmap; a function of a "
        "package that arranges dims of size 1 in its own way can be written with reshape and torch's ops",
    )  # fmt: skip


def _write(gm: GraphModule, shares: Sequence[list[Any]], dims: Sequence[int | None]) -> Node:
    """Put multiples of a size of an input, the batch size, where the shares are."""
    nodes = list(gm.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    carrier, dim = next((n, d) for n, d in zip(inputs, dims, strict=True) if d is not None)
    with gm.graph.inserting_after(inputs[-1]):
        batch = gm.graph.call_function(aten.sym_size.int, (carrier, dim))
    for node, flat in zip(nodes, shares, strict=True):
        if not any(isinstance(v, Share) for v in flat):
            continue
        with gm.graph.inserting_before(node):
            new = [number(gm, batch, v) if isinstance(v, Share) else v for v in flat]
        node.args, node.kwargs = pytree.tree_unflatten(new, pytree.tree_structure((node.args, node.kwargs)))
    return batch


class _Described(Interpreter):
    """Runs a graph on fake tensors and keeps each value in the meta of its node.

    fixed: the node, if any, that turned the symbol in the shape of `carrier` into a number.  at: the one that runs.
    """

    def __init__(self, gm: GraphModule, carrier: torch.Tensor) -> None:
        super().__init__(gm)
        self.carrier = carrier
        self.fixed: Node | None = None
        self.at: Node = next(iter(gm.graph.nodes))

    def run_node(self, n: Node) -> Any:
        self.at = n
        result = super().run_node(n)
        if made := sizes_made(self.carrier, result):
            n.meta["unbacked_bindings"] = made
        if self.fixed is None and not any(size.free_symbols for size in facts.shape(self.carrier)):
            self.fixed = n
        if n.op != "output":
            n.meta["val"] = result
        return result


def _describe(gm: GraphModule, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> None:
    fakes = symbolic_inputs(tensors, dims)
    with fakes[0].fake_mode, enable_python_dispatcher(), torch.no_grad(), no_plain_batch_size():  # type: ignore[attr-defined]
        carrier = next(fake for fake, dim in zip(fakes, dims, strict=True) if dim is not None)
        described = _Described(gm, carrier)
        try:
            described.run(*fakes)
        except PsgError as error:  # torch.fx writes the graph's own traceback into its text
            raise error.alone() from None
        except Exception as error:
            raise _no_sizes(described.at, error) from error
    if described.fixed is not None:
        raise _one_number(described.fixed)
    gm.recompile()
