"""What is computed from the rows that a mask picks: the proof that those rows stay apart until they are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.same_op import alike
from psg_fx.op_table import known
from psg_fx.torch_private.symbols import computed_of

from ..arguments import bound
from ..values import Result
from .region import ROWS, Unfit, row_by_row

aten = torch.ops.aten
LISTS = (aten.nonzero.default, aten.where.default, aten.nonzero_numpy.default)
"""The ops that list where a mask is true."""
ONE_ROW = "psg_fx_one_row"
"""In the meta of a squeeze: whether it drops the rows that a mask picks where there is one."""
_OTHERS = 7
"""The number of samples beside the rows with which ops are tried."""


@dataclass
class Rows:
    """The rows that one mask picks.

    key: equal for masks that are computed alike.  mask: its node; axis: where the samples lie in it.  shape: to which
    it is expanded (`masked_select`), or None.
    """

    key: Any
    mask: Node
    axis: SampleAxis | None
    picks: list[Node]
    shape: tuple[Any, ...] | None = None


def pick_place(pick: Node) -> int:
    """The dim of the result in which the rows lie."""
    if pick.target is aten.masked_select.default:
        return 0
    return next(d for d, n in enumerate(pick.args[1]) if n is not None)  # type: ignore[arg-type]


class Picked:
    """The nodes that are computed from the rows of one mask.

    symbols: the unknown numbers of rows, all equal.  ragged: the nodes with such rows, and their numbers.
    """

    def __init__(self, gm: GraphModule, rows: Rows, after: set[Node]) -> None:
        self.gm, self.rows = gm, rows
        self.symbols = {s for pick in rows.picks for s in symbols_of(pick)} - {facts.graph_facts(gm).batch}
        self.order = [n for n in gm.graph.nodes if n in after]
        self.ragged = {n for n in self.order if self.knows(n)}

    def knows(self, node: Node) -> bool:
        """Whether the number of rows is in the shape of the node, or in the number that it is."""
        return bool(symbols_of(node) & self.symbols)

    def proven(self) -> dict[Node, Result]:
        """Where the rows lie in each value; rows stand for samples in a graph of their own."""
        own = [n for n in self.order if n not in self.rows.picks and self.is_of_rows(n)]
        inside = set(own)
        inputs = list(dict.fromkeys(n for node in own for n in node.all_input_nodes if n not in inside))
        numbers = {n: self.number_of(n) for n in inputs if not isinstance(n.meta.get("val"), Tensor)}
        tensors = [n for n in inputs if n not in numbers]
        return row_by_row(own, dict(zip(tensors, zip(*self.examples(tensors), strict=True), strict=True)), numbers)

    def is_of_rows(self, node: Node) -> bool:
        """Whether a node has rows, or is made of a value or number that has them."""
        if asserts(node):
            return False
        if node in self.ragged:
            return not isinstance(node.meta["val"], (torch.SymBool, bool))
        return any(n in self.ragged and isinstance(n.meta["val"], (Tensor, tuple, list)) for n in node.all_input_nodes)

    def place_of(self, node: Node) -> int | None:
        return pick_place(node) if node in self.rows.picks else None

    def number_of(self, node: Node) -> Any:
        """A number that is not of the rows, with some number of samples."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            raise Unfit
        return facts.at(facts.expr(value), facts.graph_facts(self.gm).batch, _OTHERS)

    def examples(self, nodes: Sequence[Node]) -> tuple[list[Tensor], list[int | None]]:
        """Tensors of the nodes' shapes with some number of rows and of samples, and where the rows lie."""
        batch, made = facts.graph_facts(self.gm).batch, []
        for n in nodes:
            value = n.meta["val"]
            sizes = {batch: _OTHERS} | dict.fromkeys(self.symbols, ROWS)
            shape = [s.subs(sizes) for s in facts.shape(value)]
            if not all(s.is_Integer for s in shape):
                raise Unfit
            made.append(torch.empty([int(s) for s in shape], dtype=value.dtype, device="meta"))
        return made, [self.place_of(n) for n in nodes]

    def sinks(self, axes: Mapping[Node, Result]) -> set[Node]:
        """The nodes that sum rows, or count them; anything else at which the rows end is unfit.  So is what goes by
        dims, or counts, where one row may have lost its dim: `x[mask].squeeze().sum(0)`.
        """
        found, dropped = set(), any(node.meta.get(ONE_ROW) for node in self.ragged)
        for node in self.order:
            if node in self.ragged or asserts(node) or not any(n in self.ragged for n in node.all_input_nodes):
                continue
            numbers = [n for n in node.all_input_nodes if n in self.ragged and is_number(n)]
            tensors = [n for n in node.all_input_nodes if n in self.ragged and n not in numbers]
            counted = bool(numbers) and not tensors and self.counts(node, numbers)
            if not counted and (numbers or len(tensors) != 1 or not _is_sum(node) or not axes[node].reduced):
                raise Unfit
            if dropped and (numbers or facts.shape(node.meta["val"])):
                raise Unfit
            found.add(node)
        return found

    def counts(self, node: Node, numbers: Sequence[Node]) -> bool:
        """Whether the number of rows, or what follows from it, enters as a value: `x.sum() / max(x.shape[0], 1)`."""
        if node.op != "call_function" or node.target not in (aten.div.Tensor, aten.mul.Tensor):
            return False
        return all(self.number(n, torch.tensor(ROWS)) is not None for n in numbers)

    def number(self, node: Node, count: Tensor) -> Tensor | None:
        """A number that follows from how many rows are picked, of one sample with `count` rows; None: it does not, or
        in a way that is not known.
        """
        value = node.meta["val"].node.expr.subs(facts.graph_facts(self.gm).batch, 1)
        return computed_of(value, dict.fromkeys(self.symbols, count))


def _is_sum(node: Node) -> bool:
    """Whether there is a result of the rows that count, without the others."""
    order = bound(node)["ord"] if node.target is aten.linalg_vector_norm.default else 1
    return known(node.target).over_kept_rows is not None and 0 < order < float("inf")


def is_number(node: Node) -> bool:
    """Whether it is a number that is not known yet."""
    return isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat))


def symbols_of(node: Node) -> set[Any]:
    """The symbols in the shapes of a node, or in the number that it is."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return set(value.node.expr.free_symbols)
    return {s for t in facts.tensors(value) for size in facts.shape(t) for s in size.free_symbols}


def asserts(node: Node) -> bool:
    """Whether a node only checks something, as export has it check sizes."""
    names = ("_assert", "sym_constrain_range")
    return node.op == "call_function" and any(word in str(node.target) for word in names)


def said_once(gm: GraphModule, masks: Sequence[Node]) -> list[Node]:
    """The masks, of those that are computed alike the first: `x[x < 0] = f(x[x < 0])`."""
    numbers = alike(gm)
    first: dict[int, Node] = {}
    wanted = {numbers[mask] for mask in masks}
    for node in gm.graph.nodes:
        if numbers[node] in wanted and (mask := first.setdefault(numbers[node], node)) is not node:
            node.replace_all_uses_with(mask)
    return list(first.values())
