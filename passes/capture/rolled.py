"""Loops over samples, as `torch.stack([f(row) for row in x])`: each turn computes the same of a row of its own, and one
call of `torch.vmap` what all of them do.

How many turns there are follows the number of samples, so that captures at several batch sizes would differ.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from psg_fx.errors import PsgError
from psg_fx.graph.nodes import place
from psg_fx.graph.same_op import draws, without_unread
from psg_fx.graph.splicing import splice
from psg_fx.source import source_line

from ..independence.arguments import bound, dim_of
from .constants import alike
from .functions.under_vmap import batch_norm
from .taken_apart import JOINING

aten = torch.ops.aten

_BY_FORMULA: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_no_training.default: lambda x, weight, bias, mean, var, momentum, eps: (
        batch_norm(x, mean, var, weight, bias, False, momentum, eps),
    )
}
"""What `vmap` would do turn by turn.  So it would attention, but for that of plain products."""

Turns = tuple[Node, ...]
"""What each turn of a loop has in one place."""


def roll(gm: GraphModule, size: int) -> str:
    """Write what the turns of loops over `size` rows have computed at once, where it is put together, added up, or
    written in one tensor.  Returns the line of one of them, if there are any.
    """
    _read_what_is_written(gm)
    line = ""
    for node in list(gm.graph.nodes):
        turns = _joined(node) or _added(node) or _written(node)
        if len(turns) != size:
            continue
        loop = _Loop(size, _from_rows(gm) if size == 1 else frozenset())
        found = loop.written(gm, node, turns) if loop.reads(turns) else None
        if found is not None:
            node.replace_all_uses_with(found)
            line = line or source_line(node)
    without_unread(gm)
    _sort(gm)
    return line


def _read_what_is_written(gm: GraphModule) -> None:
    """Rows of a tensor in which others have been written are read where they come from."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.select.int):
        read, source = _row(node), cast("Any", node.args[0])
        while read[0] is not None and (written := _written_row(source)) and written[0].dim == read[0].dim:
            if written[1] == read[1]:
                node.replace_all_uses_with(source.args[1])
                break
            source = source.args[0]
            node.replace_input_with(node.args[0], source)
    without_unread(gm)


def _sort(gm: GraphModule) -> None:
    """What a single turn has computed of no row stays where it was, what several have is in the loop: every node comes
    to where it is first read.  Nodes that draw keep their order.
    """
    if any(map(draws, gm.graph.nodes)):
        return
    output, placed = gm.graph.output_node(), set(gm.graph.find_nodes(op="placeholder"))
    for last in [n for n in gm.graph.nodes if not n.users]:
        place(last, output, placed)


@dataclass(frozen=True)
class _Row:
    """One of `size` rows of a value along a dim.  keeps: with that dim, of size 1."""

    of: Node
    dim: int
    size: int
    keeps: bool


class _Loop:
    """What turns compute alike.  size: how many turns there are.  from_rows: of a single turn, all that follows from a
    row, and is no row of its own; what several turns share they read from one node.
    """

    def __init__(self, size: int, from_rows: frozenset[Node]) -> None:
        self.size, self.from_rows = size, from_rows
        self.rows: dict[Turns, _Row] = {}
        self.shared: dict[Turns, Node] = {}
        self.body: dict[Turns, list[Any]] = {}
        """What a turn computes, in order, and of what: the leaves of the arguments, a `_Place` for a node."""

    def reads(self, last: Turns) -> bool:
        """Whether all turns compute this alike, of rows of their own."""
        waiting = [last]
        while waiting:
            turns = waiting[-1]
            if self._is_known(turns):
                waiting.pop()
                continue
            leaves = _leaves(turns)
            if leaves is None:
                return False
            missing = [each for each in leaves if isinstance(each, _Place) and not self._is_known(each.turns)]
            waiting += [each.turns for each in missing]
            if not missing:
                self.body[turns] = leaves
        return bool(self.rows) and bool(self.body)

    def _is_known(self, turns: Turns) -> bool:
        if turns in self.body or turns in self.rows or turns in self.shared:
            return True
        if (row := _row_of(turns)) is not None and row.of not in self.from_rows:
            self.rows[turns] = row
        elif turns[0] not in self.from_rows if self.size == 1 else len(set(turns)) == 1:
            self.shared[turns] = turns[0]
        return turns in self.rows or turns in self.shared

    def written(self, gm: GraphModule, node: Node, last: Turns) -> Any:
        """All turns at once, in front of the node; None where `vmap` does not know an op."""
        given = [row.of for row in self.rows.values()] + list(self.shared.values())
        if not all(isinstance(each.meta["val"], Tensor) for each in given):
            return None
        dims = [row.dim for row in self.rows.values()] + [None] * len(self.shared)
        along = _dim(node)

        def turn(*values: Tensor) -> Any:
            known: dict[Turns, Any] = dict(zip((*self.rows, *self.shared), values, strict=True))
            for turns, row in self.rows.items():
                known[turns] = known[turns].unsqueeze(row.dim) if row.keeps else known[turns]
            for turns, leaves in self.body.items():
                filled = [known[each.turns] if isinstance(each, _Place) else each for each in leaves]
                args, kwargs = pytree.tree_unflatten(filled, pytree.tree_structure((turns[0].args, turns[0].kwargs)))
                op: Any = turns[0].target
                known[turns] = _BY_FORMULA.get(op, op)(*args, **kwargs)
            return known[last]

        def all_turns(*values: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                found: Tensor = torch.vmap(turn, tuple(dims), along)(*values)
            if _is_sum(node):
                return found.sum(0)
            if node.target is aten.cat.default:
                return found.flatten(along, along + 1)
            return found.to(node.meta["val"].dtype)

        try:
            return splice(gm, node, all_turns, given)
        except (PsgError, RuntimeError, ValueError):
            return None


@dataclass(frozen=True)
class _Place:
    """In the place of a node among the arguments of a turn."""

    turns: Turns


def _leaves(turns: Turns) -> list[Any] | None:
    """The leaves of the arguments of a node that each turn has; None where these are not alike."""
    first = turns[0]
    if any(n.op != "call_function" or n.target is not first.target for n in turns) or draws(first):
        return None
    flat = [pytree.tree_leaves((n.args, n.kwargs)) for n in turns]
    if len({len(leaves) for leaves in flat}) > 1:
        return None
    found: list[Any] = []
    for column in zip(*flat, strict=True):
        if all(isinstance(v, Node) for v in column):
            found.append(_Place(column))
        elif any(isinstance(v, Node) for v in column) or not alike(column):
            return None
        else:
            found.append(column[0])
    return found


def _joined(node: Node) -> Turns:
    """The parts of a stack or cat."""
    return tuple(node.args[0]) if node.target in JOINING else ()  # type: ignore[arg-type]


def _added(node: Node) -> Turns:
    """What is added up, from zero: `sum([f(row) for row in x])`."""
    found: list[Any] = []
    while _is_sum(node) and isinstance(node.args[1], Node):
        found.append(node.args[1])
        node = node.args[0]  # type: ignore[assignment]
    if not _is_sum(node) or node.args[1] not in (0, 0.0):
        return ()
    return (node.args[0], *reversed(found))


def _written(node: Node) -> Turns:
    """What is written in the rows of one tensor, `out[i] = f(x[i])`, if all of them are written."""
    last = _written_row(node)
    if last is None or any(_written_row(user) and user.args[0] is node for user in node.users):
        return ()
    found: dict[int, Any] = {}
    while (row := _written_row(node)) and row[0].dim == last[0].dim:
        found.setdefault(row[1], node.args[1])
        node = row[0].of
    rows = range(last[0].size)
    return tuple(found[i] for i in rows) if set(rows) == found.keys() else ()


def _written_row(node: Node) -> tuple[_Row, int] | None:
    """The row of a value that a node writes anew, and which one."""
    return _at(node, keeps=False) if node.target is aten.select_scatter.default else None


def _is_sum(node: Any) -> bool:
    return (
        isinstance(node, Node) and node.target is aten.add.Tensor and not node.kwargs and isinstance(node.args[0], Node)
    )


def _row_of(turns: Turns) -> _Row | None:
    """The row of one value that each turn reads, in their order."""
    found = [_row(node) for node in turns]
    rows = {row for row, _ in found}
    row = rows.pop()
    if rows or row is None or [index for _, index in found] != list(range(len(turns))):
        return None
    return row if row.size == len(turns) else None


def _row(node: Node) -> tuple[_Row | None, int]:
    """The row that a node takes out of a value, and which one."""
    if node.target is aten.select.int:
        return _at(node, keeps=False) or (None, -1)
    if node.target is aten.slice.Tensor:
        given, row = bound(node), _along(node, keeps=True)
        first, end = given["start"] or 0, row and row.size if given["end"] is None else given["end"]
        if row is not None and isinstance(first, int) and isinstance(end, int) and min(end, row.size) - first == 1:
            return row, first
    if node.target is operator.getitem:
        split, index = cast("tuple[Any, int]", node.args)
        if split.target is aten.unbind.int or (split.target is aten.split.Tensor and split.args[1] == 1):
            return _along(split, keeps=split.target is not aten.unbind.int), index
    return None, -1


def _at(node: Node, keeps: bool) -> tuple[_Row, int] | None:
    row, index = _along(node, keeps), bound(node)["index"]
    return (row, index % row.size) if row is not None and isinstance(index, int) else None


def _along(node: Node, keeps: bool) -> _Row | None:
    """A row of the first operand along the dim that an op has; None where nobody knows how many there are."""
    value = bound(node)["self"]
    shape = value.meta["val"].shape
    dim = dim_of(node, len(shape))
    return _Row(value, dim, shape[dim], keeps) if isinstance(shape[dim], int) else None


def _from_rows(gm: GraphModule) -> frozenset[Node]:
    """All that follows from a row of something that has one."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if _row_of((node,)) is not None or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _dim(node: Node) -> int:
    """Where the turns lie in what puts them together."""
    if _is_sum(node):
        return 0
    return dim_of(node, node.meta["val"].ndim)
