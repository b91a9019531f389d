"""Reads and writes at places that a mask picks of tables of places, as losses of detectors match boxes to targets.

x[b[m], s[m]]  ->  x[b, s][m]        x[b[m], s[m]] = v[m]  ->  x[b, where(m, s, spare)] = v, with a spare column of x

b is the number of the sample as ever (`arange(B)`, expanded); where the mask picks nothing, a table of places may hold
anything, which nobody looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph.splicing import splice

from ..values import bound
from .nested import mask_by

aten = torch.ops.aten


def look_up_at_picked_places(gm: GraphModule) -> None:
    """Rewrite these where all places are picked by one mask."""
    for node in list(gm.graph.nodes):
        if node.target not in (aten.index.Tensor, aten.index_put.default):
            continue
        tables, mask = _tables(bound(node)["indices"])
        if mask is None or not _nodes(tables) or len(tables) < 2:
            continue
        made = _read(gm, node, tables, mask) if node.target is aten.index.Tensor else _write(gm, node, tables, mask)
        if made is not None:
            node.replace_all_uses_with(made)
    gm.graph.eliminate_dead_code()


def _tables(indices: Sequence[Any]) -> tuple[list[Node | int], Node | None]:
    """The tables of places that one mask picks from, and the mask; None if it is not so.  Where the mask itself is an
    index, it stands for its own places: along each dim, for which its number is here, they count on.
    """
    picks = [_pick(index) for index in indices]
    masks = {mask for _, mask in picks}
    mask = masks.pop() if masks else None
    if masks or mask is None:
        return [], None
    return [t for table, _ in picks for t in (range(mask.meta["val"].ndim) if table is mask else (table,))], mask


def _pick(node: Any) -> tuple[Any, Node | None]:
    """What a mask picks entries of, and the mask, which has all its dims; a mask itself; None for all else."""
    if not isinstance(node, Node):
        return None, None
    if node.meta["val"].dtype is torch.bool:
        return node, node
    table, mask = _picked(node)
    return (table, mask) if mask is not None and table.meta["val"].ndim == mask.meta["val"].ndim else (None, None)


def _picked(node: Node) -> tuple[Any, Node | None]:
    """A value and the mask that picks rows of it; None for all else."""
    mask = mask_by(node) if node.target is aten.index.Tensor else None
    return (None, None) if mask is None else (bound(node)["self"], mask)


def _places(tables: Sequence[Node | int], given: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
    """The tables: of a dim of the mask, its places count on along it."""
    rest = iter(given)
    return [_counting(mask, table) if isinstance(table, int) else next(rest) for table in tables]


def _counting(mask: Tensor, dim: int) -> Tensor:
    shape = [1] * mask.ndim
    shape[dim] = mask.shape[dim]
    return torch.arange(mask.shape[dim], device=mask.device).view(shape).expand(mask.shape)


def _read(gm: GraphModule, node: Node, tables: Sequence[Node | int], mask: Node) -> Any:
    def read(x: Tensor, mask: Tensor, *given: Tensor) -> Tensor:
        first, *others = _places(tables, given, mask)
        return x[(first, *(torch.where(mask, other, 0) for other in others))]

    whole = splice(gm, node, read, [bound(node)["self"], mask, *_nodes(tables)])
    with gm.graph.inserting_before(node):
        made = gm.graph.call_function(aten.index.Tensor, (whole, [mask]))
    made.meta = dict(node.meta)
    return made


def _nodes(tables: Sequence[Node | int]) -> list[Node]:
    return [table for table in tables if isinstance(table, Node)]


def _write(gm: GraphModule, node: Node, tables: Sequence[Node | int], mask: Node) -> Any:
    value: Any = bound(node)["values"]
    given, of = (value, mask) if value.meta["val"].ndim == 0 else _picked(value)
    if of is not mask:
        return None
    adds, dim = bound(node)["accumulate"], len(tables) - 1

    def write(x: Tensor, value: Tensor, mask: Tensor, *given: Tensor) -> Tensor:
        first, *middle, last = _places(tables, given, mask)
        places = (first, *(torch.where(mask, other, 0) for other in middle))
        if adds:
            value = value.expand(*mask.shape, *x.shape[dim + 1 :]) if value.ndim == 0 else value
            value = torch.where(mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)), value, 0)
            return x.index_put((*places, torch.where(mask, last, 0)), value, accumulate=True)
        size = x.shape[dim]
        last = torch.where(mask, torch.where(last < 0, last + size, last), size)
        wider = torch.cat([x, x.narrow(dim, 0, 1)], dim)
        return wider.index_put((*places, last), value).narrow(dim, 0, size)

    return splice(gm, node, write, [bound(node)["self"], given, mask, *_nodes(tables)])
