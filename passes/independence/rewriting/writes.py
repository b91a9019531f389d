"""Rows of several axes that are added or written to those of another one: one axis after the other.

    index_add(z, cat(p, q), cat(u, v)) = index_add(index_add(z, p, u), q, v)

Rows that do not count add zero.  Where rows are written instead of added, the last one of each place stands: of the
last part that has one there.  A largest value over several parts is not the largest of largest ones where it comes
to derivatives: these are shared by all rows that are as large, so they are counted over all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.ops.last_rows import last_rows

from ..arguments import bound, op_name

aten = torch.ops.aten
_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
_WRITES = (*_PUTS, aten.index_add.default, aten.scatter_add.default, aten.scatter_reduce.two, aten.scatter.src)
_REDUCED = ("sum", "mean", "amax", "amin")


@dataclass(frozen=True)
class Write:
    """An op that adds rows to where a pointer says, writes them or reduces them there in another way.

    onto: to which values.  index, source: the pointer and what is added.  dim: the dim of onto it counts along.
    places: the dims in which the rows of pointer and source lie.  reduce: "last" for rows that are written.
    """

    node: Node
    onto: Node
    index: Node
    source: Node
    dim: int
    places: dict[Node, int]
    reduce: str = "sum"


def write_of(node: Node, along: Callable[[Node], bool]) -> Write | None:
    """A node as such an op, whose pointer and values have rows of the axis; None for another one."""
    if node.target not in _WRITES:
        return None
    given = bound(node)
    onto: Node = given["self"]
    source: Any = given.get("values") or given.get("src") or given.get("source")
    width, reduce = onto.meta["val"].ndim, given.get("reduce") or "sum"
    if node.target in _PUTS:
        ((dim, index), *more) = [(d, n) for d, n in enumerate(given["indices"]) if n is not None]
        if more or index.meta["val"].ndim != 1 or source.meta["val"].ndim != width:
            return None
    else:
        dim, index = int(given["dim"]) % width, given["index"]
    if len({onto, index, source}) < 3 or not along(index) or not along(source) or reduce not in _REDUCED:
        return None
    if node.target is aten.scatter.src or not given.get("accumulate", True):
        reduce = "last"
    numbers = onto.meta["val"].dtype is not torch.bool if reduce == "last" else onto.meta["val"].is_floating_point()
    if reduce != "sum" and not (numbers and (node.target in _PUTS or _same_shape(index, source))):
        return None
    return Write(node, onto, index, source, dim, {index: min(dim, index.meta["val"].ndim - 1), source: dim}, reduce)


def _same_shape(a: Node, b: Node) -> bool:
    return facts.shape(a.meta["val"]) == facts.shape(b.meta["val"])


Given = Sequence[tuple[Tensor, Tensor, Tensor | None]]
"""Of each part the pointer, the values, and which of its rows count (of as many dims as the values; None: all)."""


def written(write: Write, onto: Tensor, parts: Given) -> Tensor:
    """What the op gives of all parts."""
    if write.reduce == "last":
        return _last(write, onto, parts)
    if write.node.target is not aten.scatter_reduce.two:
        for index, source, kept in parts:
            onto = _op(write, onto, index, zeroed(source, kept))
        return onto
    included = bool(bound(write.node)["include_self"])
    if write.reduce in ("sum", "mean"):
        return _mean(write, onto, parts, included)
    return _largest(write, onto, parts, included)


def zeroed(source: Tensor, kept: Tensor | None) -> Tensor:
    """Zeros in the place of rows that do not count."""
    return source if kept is None else torch.where(kept, source, _filled(source, 0))


def _filled(like: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _derivative(x: Tensor) -> Tensor:
    """Zero, whose derivative is that of x; an infinite x stays."""
    return torch.where(x.isinf(), x, x - x.detach())


def _op(write: Write, onto: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """The op itself on other values."""
    values = {write.onto: onto, write.index: index, write.source: source}
    args, kwargs = torch.fx.map_arg((write.node.args, write.node.kwargs), values.__getitem__)
    found: Tensor = write.node.target(*args, **kwargs)  # type: ignore[operator]
    return found


def _counts(write: Write, onto: Tensor, parts: Given) -> Tensor:
    """How many rows that count are written to each place."""
    count = torch.zeros_like(onto)
    for index, source, kept in parts:
        count = count.scatter_add(write.dim, index, zeroed(torch.ones_like(source), kept))
    return count


def _mean(write: Write, onto: Tensor, parts: Given, included: bool) -> Tensor:
    """The sum of the rows of each place, or the mean; z where there are none."""
    total = onto if included else torch.zeros_like(onto)
    for index, source, kept in parts:
        total = total.scatter_add(write.dim, index, zeroed(source, kept))
    if write.reduce == "sum" and included:
        return total
    count = _counts(write, onto, parts)
    if write.reduce == "mean":
        total = total / (count + 1 if included else count.clamp(min=1))
    return total if included else torch.where(count > 0, total, onto)


def _largest(write: Write, onto: Tensor, parts: Given, included: bool) -> Tensor:
    """The largest row m of each place, whose derivative is shared by the n rows that are as large:

        y = m + (Σ_r [u_r = m] (u_r - u_r°) + [z = m] (z - z°)) / n          (x°: x without its derivative)

    As in torch, z counts in n also where it has no part in m.
    """
    lowest = -torch.inf if write.reduce == "amax" else torch.inf
    bare = onto.detach()
    most = bare if included else torch.full_like(bare, lowest)
    for index, source, kept in parts:
        rows = source.detach()
        rows = rows if kept is None else torch.where(kept, rows, _filled(rows, lowest))
        most = most.scatter_reduce(write.dim, index, rows, write.reduce, include_self=True)
    count = None if included else _counts(write, bare, parts)
    most = most if count is None else torch.where(count > 0, most, bare)
    if op_name(write.source) == "aten.detach":
        return most if included else torch.where(most == bare, onto, most)
    equal = onto == most
    ties, moved = equal.to(onto.dtype), zeroed(_derivative(onto), equal) if included else torch.zeros_like(onto)
    for index, source, kept in parts:
        tied = source == most.gather(write.dim, index)
        tied = tied if kept is None else tied & kept
        ties = ties.scatter_add(write.dim, index, tied.to(source.dtype))
        moved = moved.scatter_add(write.dim, index, zeroed(_derivative(source), tied))
    found = most + moved / ties
    return found if count is None else torch.where(count > 0, found, onto)


def _last(write: Write, onto: Tensor, parts: Given) -> Tensor:
    """The last row of each place, z where there are none.  Rows that do not stand have the derivative of the place too,
    as in torch, which knows of no order.
    """
    moved, taken = torch.zeros_like(onto), None
    for index, source, kept in reversed(parts):
        last = _wide(write, last_rows(onto, index, _entries(write, kept, index), write.dim), source)
        stands = last if taken is None else last & ~_read(write, taken, index)
        others = ~stands if kept is None else kept & ~stands
        values = torch.where(stands, source, zeroed(source - source.detach(), others & source.isfinite()))
        moved = _added(write, moved, index, values)
        written = _added(write, torch.zeros_like(onto, dtype=torch.int64), index, last.to(torch.int64)) > 0
        taken = written if taken is None else taken | written
    assert taken is not None
    return torch.where(taken, moved, onto)


def _entries(write: Write, kept: Tensor | None, index: Tensor) -> Tensor | None:
    """Which entries of a pointer count."""
    if kept is None:
        return None
    return kept.expand_as(index) if write.node.target not in _PUTS else kept.reshape(-1)


def _wide(write: Write, rows: Tensor, source: Tensor) -> Tensor:
    """Something for each entry of a pointer, as it is for the entries of the values."""
    if write.node.target not in _PUTS:
        return rows
    return rows.reshape([-1 if d == write.dim else 1 for d in range(source.ndim)]).expand_as(source)


def _read(write: Write, x: Tensor, index: Tensor) -> Tensor:
    """The rows of x that a pointer points to."""
    if write.node.target not in _PUTS:
        return x.gather(write.dim, index)
    found: Tensor = aten.index(x, [None] * write.dim + [index])
    return found


def _added(write: Write, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """x with rows added to where a pointer says."""
    if write.node.target not in _PUTS:
        return x.scatter_add(write.dim, index, source)
    found: Tensor = aten.index_put(x, [None] * write.dim + [index], source, True)
    return found
