"""Rows of several axes that are added or written to those of another one: one axis after the other.

    index_add(z, cat(p, q), cat(u, v)) = index_add(index_add(z, p, u), q, v)

Rows that do not count add zero.  A largest value over several parts is not the largest of largest ones where it comes
to derivatives: these are shared by all rows that are as large, so they are counted over all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from .values import bound, op_name

_ADDS = ("aten.index_add", "aten.scatter_add")
_PUTS = ("aten.index_put", "aten._unsafe_index_put")


@dataclass(frozen=True)
class Write:
    """An op that writes rows to where a pointer says.

    onto: to which values.  index, source: the pointer and what is written.  dim: the dim of onto it counts along.
    places: the dims in which the rows of pointer and source lie.  adds: whether rows that do not count can be zeros.
    """

    node: Node
    onto: Node
    index: Node
    source: Node
    dim: int
    places: dict[Node, int]
    reduce: str
    adds: bool


def write_of(node: Node, along: Callable[[Node], bool]) -> Write | None:
    """A node as such an op, whose pointer and values have rows of the axis; None for another one."""
    name = op_name(node)
    if name not in (*_ADDS, *_PUTS, "aten.scatter", "aten.scatter_reduce"):
        return None
    given = bound(node)
    onto, reduce = given["self"], "sum"
    if name in _PUTS:
        used = [(d, n) for d, n in enumerate(given["indices"]) if n is not None]
        (dim, index), source = used[0], given["values"]
        if len(used) > 1 or index.meta["val"].ndim != 1 or source.meta["val"].ndim != onto.meta["val"].ndim:
            return None
        reduce = "sum" if given["accumulate"] else "put"
    else:
        dim, index = int(given["dim"]) % onto.meta["val"].ndim, given["index"]
        source = given.get("src", given.get("source"))
        reduce = given.get("reduce") or ("put" if name == "aten.scatter" else "sum")
    if not isinstance(source, Node) or source is index or onto in (index, source) or reduce == "prod":
        return None
    if not along(index) or not along(source):
        return None
    own = 0 if index.meta["val"].ndim == 1 else dim
    return Write(node, onto, index, source, dim, {index: own, source: dim}, reduce, reduce != "put")


Given = Sequence[tuple[Tensor, Tensor, Tensor | None]]
"""Of each part the pointer, the values, and which of its rows count (of as many dims as the values; None: all)."""


def written(write: Write, onto: Tensor, parts: Given) -> Tensor:
    """What the op gives of all parts."""
    if op_name(write.node) != "aten.scatter_reduce":
        for index, source, kept in parts:
            onto = _op(write, onto, index, zeroed(source, kept))
        return onto
    included = bool(bound(write.node)["include_self"])
    if write.reduce in ("sum", "mean"):
        return _mean(write, onto, parts, included)
    return _largest(write, onto, parts, included)


def zeroed(source: Tensor, kept: Tensor | None) -> Tensor:
    """Zeros in the place of rows that do not count."""
    return source if kept is None else torch.where(kept, source, torch.zeros((), dtype=source.dtype))


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
        rows = rows if kept is None else torch.where(kept, rows, torch.full((), lowest, dtype=rows.dtype))
        most = most.scatter_reduce(write.dim, index, rows, write.reduce, include_self=True)
    count = None if included else _counts(write, bare, parts)
    most = most if count is None else torch.where(count > 0, most, bare)
    if op_name(write.source) == "aten.detach":
        return most if included else torch.where(most == bare, onto, most)
    equal = onto == most
    ties, moved = equal.to(onto.dtype), torch.where(equal, onto - bare, torch.zeros((), dtype=onto.dtype))
    if count is not None:
        moved = torch.zeros_like(moved)
    for index, source, kept in parts:
        tied = source == most.gather(write.dim, index)
        tied = tied if kept is None else tied & kept
        ties = ties.scatter_add(write.dim, index, tied.to(source.dtype))
        moved = moved.scatter_add(write.dim, index, zeroed(source - source.detach(), tied))
    found = most + moved / ties
    return found if count is None else torch.where(count > 0, found, onto)
