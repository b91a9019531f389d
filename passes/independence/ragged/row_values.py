"""Values along axes of rows: what they are beside those of samples.

Within one op, rows stand for samples: the op is proven with the number of its rows as its batch size, by the rules that
there are.  What joins two axes is a link (`links.py`).  *Structure* is what says how rows belong to samples: ids,
offsets, numbers of rows, masks made of them.  It knows nothing of the samples, so any op may compute with it; but it is
not what a sample alone would have, so it may point and mask, and do nothing else, unless it is shown to be
(`alone.py`), as counts of rows are.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.same_op import draws
from psg_fx.ops.last_rows import last_rows

from ..arguments import bound, numbers_of_samples, op_name
from ..refused import mixed
from ..table import find
from ..values import Op, Result, tensors
from .alone import Parts
from .links import Link, attending, pointing
from .pairs import of_pairs

_POINT = (
    "use ids to point (index_add, x[ids]) and in masks alone; counts of rows are sums of ones by index_add, and "
    "positions within a sample are an input"
)
_POOL = (
    "sum the rows of each sample by itself: zeros(B, ..).index_add(0, ids, rows), divided by its own count; or give "
    "the loss for each sample, [B]"
)


_ROW_BY_ROW = ["add", "sub", "unsqueeze", "expand", "alias", "clone", "detach", "_to_copy"]
"""Ops that leave numbers with their rows."""


class RowValues:
    """What the walk knows of axes of rows.

    counts: the symbols of the numbers of samples and of rows.  links: the ops that join rows, in order.
    plain: values made of nothing but numbers in the code.  moved: structure to which numbers of samples were added.
    parts: what structure is for a sample alone.
    """

    def __init__(self, gm: GraphModule) -> None:
        info = facts.graph_facts(gm)
        self.batch, self.rows = info.batch, tuple(info.rows)
        self.counts = {info.batch, *info.rows}
        self.links: list[Link] = []
        self.plain: set[Node] = set()
        self.moved: set[Node] = set()
        self.parts = Parts(gm, self.plain)

    def symbols(self, nodes: Sequence[Node]) -> set[sympy.Symbol]:
        """The numbers of rows and samples in the shapes of nodes."""
        sizes = [size for n in nodes for t in tensors(n.meta.get("val")) for size in facts.shape(t)]
        return {symbol for size in sizes for symbol in size.free_symbols} & self.counts

    def visit(self, op: Op) -> tuple[Result, str] | None:
        """What is known of an op that is about rows in a way that no rule of samples knows."""
        node, known = op.node, op.known
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        about = [n for n in inputs if known[n].structure]
        others = [n for n in inputs if not known[n].structure]
        self.note_plain(node, inputs, about)
        self.parts.note(op)
        if (same := self.picks_the_same(op)) is not None:
            return same, "same rows"
        if self.is_structure(node, about, [n for n in others if not known[n].index]):
            if any(n in self.moved for n in about):
                self.move(op)
            return self.structure(node), "structure"
        self.refuse_counts(node)
        if (joined := self.joining(op)) is not None:
            return joined
        rule = find(node.target)
        if rule is not None and rule.shapes_only and len(self.symbols([node, *inputs])) > 1:
            return self.made(node, rule.proof), rule.proof
        about = [n for n in about if n in self.moved or not self.parts.is_value(n)]
        own = all(known[n].index for n in about) and rule is not None and rule.index
        if about and not own and (rule is None or not rule.shapes_only):
            return self.beside_data(op, about), "pointer"
        return None

    def joining(self, op: Op) -> tuple[Result, str] | None:
        """What an op makes that joins rows, or has a value for each pair of them; its links are noted."""
        found = pointing(op) or attending(op) or of_pairs(op)
        if found is None:
            return None
        result, links = found
        if any({link.own, link.other} & set(self.rows) for link in links):
            self.links += links
            return result, links[0].kind
        return (result, "pairs of rows") if result.pairs else None

    def refuse_counts(self, node: Node) -> None:
        """The number of rows of all samples is a size, and no value."""
        for count in self.rows:
            if numbers := numbers_of_samples(node, count):
                raise mixed(node, f"%{numbers[0].name} is the number of rows of all samples", _POOL)

    def note_plain(self, node: Node, inputs: Sequence[Node], about: Sequence[Node]) -> None:
        """Whether a value is made of numbers in the code alone.  about: structure, which may give its shape."""
        rule = find(node.target)
        plain = {*self.plain, *about} if rule is not None and rule.shapes_only else self.plain
        if node.op == "call_function" and not draws(node) and all(n in plain for n in inputs):
            self.plain.add(node)

    def is_structure(self, node: Node, about: Sequence[Node], others: Sequence[Node]) -> bool:
        """Whether a value is made of structure and of numbers in the code, and of nothing else."""
        if not all(n in self.plain for n in others) or node.target is last_rows:  # a sample alone has the same
            return False
        rule = find(node.target)
        if about and not (node in self.plain and rule is not None and rule.shapes_only):
            return True
        if node not in self.plain:
            return False
        counts = self.symbols([node])
        return len(counts) > 1 or (op_name(node) == "aten.arange" and bool(counts & set(self.rows))) or _is_square(node)

    def picks_the_same(self, op: Op) -> Result | None:
        """Rows picked out of rows that are all the same, as out of `ones(B, 1)`: they do not tell who picked them.  Not
        of floats that have a gradient: it would be that of the row which is picked.
        """
        if op_name(op.node) not in ("aten.index_select", "aten.index"):
            return None
        source, *rest = op.node.args
        dim = rest[0] if len(rest) == 2 else 0 if len(rest[0]) == 1 else None  # type: ignore[arg-type]
        known = op.known[source]  # type: ignore[index]
        floats = source.meta["val"].is_floating_point() or source.meta["val"].is_complex()  # type: ignore[union-attr]
        same = known.uniform and isinstance(dim, int) and known.axes == SampleAxis(dim)
        same = same and (source in self.plain or not floats)
        return self.made(op.node, "same rows") if same else None

    def structure(self, node: Node) -> Result:
        """Structure, and where its rows lie if it has one dim of them."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return Result(structure=True)
        dims = [d for d, size in enumerate(facts.shape(value)) if size.free_symbols]
        alone = len(dims) == 1 and facts.shape(value)[dims[0]] in self.counts
        counted = bound(node) if op_name(node) == "aten.arange" else {}
        each = counted and counted.get("start", 0) == 0 and counted.get("step", 1) == 1
        return Result(SampleAxis(dims[0]) if alone else None, index=int(bool(each and alone)), structure=True)

    def made(self, node: Node, proof: str) -> Result:
        """A value made from the shapes of values along other axes: `x.new_zeros(B, D)`."""
        found = self.structure(node).axes
        if found is None and self.symbols([node]):
            raise mixed(node, "its shape has rows of several axes")
        return Result(found, uniform=proof.startswith("same"))

    def beside_data(self, op: Op, about: Sequence[Node]) -> Result:
        """Structure that meets values of samples: numbers of rows within a sample may be moved to where it begins."""
        node = op.node
        if op_name(node) in ("aten.add", "aten.sub") and not node.meta["val"].is_floating_point():
            self.move(op)
            return self.structure(node)
        raise mixed(node, f"it computes with %{about[0].name}, which numbers samples or rows: one sample alone has "
                    "others", _POINT)  # fmt: skip

    def move(self, op: Op) -> None:
        """Numbers of rows that values of samples have part in: each must stay with its own row."""
        if op_name(op.node).removeprefix("aten.") not in _ROW_BY_ROW or len(self.symbols([op.node])) > 1:
            raise op.unsupported(
                "it computes with numbers of rows that values of samples are added to, which may only point",
                "make masks of the ids and of the order of rows alone",
            )
        self.moved.add(op.node)

    def symbol(self, op: Op, shapes_only: bool) -> sympy.Symbol:
        """Whose rows an op keeps apart: the one symbol that all its rows are counted by."""
        carrying = [] if shapes_only else [n for n in op.node.all_input_nodes if op.known[n].axes is not None]
        found = self.symbols([op.node, *carrying])
        if len(found) > 1:
            raise mixed(
                op.node, "it joins rows of different axes", "let rows point to those of their own sample: x[pointer], "
                "index_add, scatter_add, scatter_reduce; attention by F.scaled_dot_product_attention with a mask",
            )  # fmt: skip
        return found.pop() if found else self.batch

    def refuse_reduced(self, node: Node, count: sympy.Symbol) -> None:
        """Rows of all samples must not be summed together, also not in the loss."""
        if count in self.rows:
            raise mixed(node, "it is taken over the rows of all samples", _POOL)


def _is_square(node: Node) -> bool:
    """Whether a value has two dims of rows."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and sum(bool(size.free_symbols) for size in facts.shape(value)) > 1


__all__ = ["RowValues"]
