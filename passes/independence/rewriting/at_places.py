"""Reads and writes at places that a mask picks of tables of places, as losses of detectors match boxes to targets.

x[b[m], s[m]]  ->  x[b, s][m]        x[b[m], s[m]] = v[m]  ->  x[b, where(m, s, spare)] = v, with a spare column of x

b is the number of the sample as ever (`arange(B)`, expanded); where the mask picks nothing, other tables of places may
hold anything, which nobody looks up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import written_before
from psg_fx.graph.order import is_reshaped
from psg_fx.graph.splicing import splice

from ..arguments import bound
from .listed import columns_of, mask_of
from .nested import has_known_rest, mask_by, put_back

aten = torch.ops.aten


Pick = tuple[tuple[Node | int, ...], Node | None]
"""Tables of places and the mask that picks entries of them; a number stands for the places along a dim of the mask."""


def look_up_at_picked_places(gm: GraphModule) -> None:
    """Rewrite these where all places are picked by one mask."""
    listed: dict[Node, Pick] = {}
    for node in list(gm.graph.nodes):
        if (mask := mask_of(node)) is not None and mask.meta["val"].dtype is torch.bool:
            listed |= {column: ((dim,), mask) for column, dim in columns_of(node).items()}
        if node.target not in (aten.index.Tensor, aten.index_put.default):
            continue
        tables, mask = _tables(bound(node)["indices"], listed)
        if mask is None or not _nodes(tables) or len(tables) < 2:
            continue
        made = _read(gm, node, tables, mask) if node.target is aten.index.Tensor else _write(gm, node, tables, mask)
        if made is not None:
            node.replace_all_uses_with(made)
    gm.graph.eliminate_dead_code()


def _tables(indices: Sequence[Any], listed: Mapping[Node, Pick]) -> Pick:
    """The tables of places that one mask picks from, and the mask; None if it is not so."""
    picks = [listed.get(index) or _pick(index) for index in indices]
    masks = {mask for _, mask in picks}
    mask = masks.pop() if masks else None
    if masks or mask is None:
        return (), None
    return tuple(table for tables, _ in picks for table in tables), mask


def _pick(node: Any) -> Pick:
    """What a mask picks entries of, and the mask, which has all its dims; a mask itself stands for its own places."""
    if not isinstance(node, Node):
        return (), None
    if node.meta["val"].dtype is torch.bool:
        return tuple(range(node.meta["val"].ndim)), node
    table, mask = _picked(node)
    return ((table,), mask) if mask is not None and table.meta["val"].ndim == mask.meta["val"].ndim else ((), None)


def _picked(node: Node) -> tuple[Any, Node | None]:
    """A value and the mask that picks rows of it; None for all else."""
    if is_reshaped(node) and facts.shape(node.meta["val"]) == facts.shape(node.args[0].meta["val"]):  # type: ignore[union-attr]
        return _picked(node.args[0])  # type: ignore[arg-type]
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


def _numbering(x: Any) -> int:
    """How many tables, of places in the dims of a value, number samples: that of the first dim, or none."""
    return int(bool(facts.shape(x.meta["val"])[0].free_symbols))


def _safe(places: Sequence[Tensor], mask: Tensor, numbering: int) -> tuple[Tensor, ...]:
    """Places that are there where the mask picks nothing, too; the numbers of samples are as they are."""
    return (*places[:numbering], *(torch.where(mask, other, 0) for other in places[numbering:]))


def _read(gm: GraphModule, node: Node, tables: Sequence[Node | int], mask: Node) -> Any:
    numbering = _numbering(bound(node)["self"])

    def read(x: Tensor, mask: Tensor, *given: Tensor) -> Tensor:
        return x[_safe(_places(tables, given, mask), mask, numbering)]

    whole = splice(gm, node, read, [bound(node)["self"], mask, *_nodes(tables)])
    with gm.graph.inserting_before(node):
        made = gm.graph.call_function(aten.index.Tensor, (whole, [mask]))
    made.meta = dict(node.meta)
    return made


def _as_many(value: Node, indices: Sequence[Any]) -> bool:
    """Whether a value has a row for each place that is picked."""
    counts = [facts.shape(index.meta["val"]) for index in indices if index.meta["val"].dtype is not torch.bool]
    return facts.shape(value.meta["val"])[:1] == counts[0] and has_known_rest(value)


def _nodes(tables: Sequence[Node | int]) -> list[Node]:
    return [table for table in tables if isinstance(table, Node)]


def _write(gm: GraphModule, node: Node, tables: Sequence[Node | int], mask: Node) -> Any:
    value: Any = bound(node)["values"]
    given, of = (value, mask) if value.meta["val"].ndim == 0 else _picked(value)
    if of is not mask:
        if not _as_many(value, bound(node)["indices"]):
            return None
        with written_before(node, node.meta):
            given = put_back(gm, value, mask)
    adds, dim = bound(node)["accumulate"], len(tables) - 1
    numbering = _numbering(bound(node)["self"])

    def write(x: Tensor, value: Tensor, mask: Tensor, *given: Tensor) -> Tensor:
        *before, last = _places(tables, given, mask)
        places = _safe(before, mask, numbering)
        if adds:
            value = value.expand(*mask.shape, *x.shape[dim + 1 :]) if value.ndim == 0 else value
            value = torch.where(mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)), value, 0)
            return x.index_put((*places, torch.where(mask, last, 0)), value, accumulate=True)
        size = x.shape[dim]
        last = torch.where(mask, torch.where(last < 0, last + size, last), size)
        wider = torch.cat([x, x.narrow(dim, 0, 1)], dim)
        return wider.index_put((*places, last), value).narrow(dim, 0, size)

    return splice(gm, node, write, [bound(node)["self"], given, mask, *_nodes(tables)])
