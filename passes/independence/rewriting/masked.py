"""Rows picked by a mask, `x[mask]`, whose number depends on the data: as many rows for every sample, some of them kept.

`loss[mask].mean()`, `cross_entropy(logits[mask], labels[mask])`: the rows that a mask does not pick are replaced by the
first one of their sample that it picks, so that what follows is computed from values that the program itself computes
with.  Where the rows are summed, theirs count zero.  That is the same if what follows treats every row by itself, which
is proven as it is of samples, with the rows in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.same_op import alike

from ..values import Result
from ..walk import Prover
from .padding import Padding
from .picked import Picked, Rows, pick_place
from .region import Unfit

aten = torch.ops.aten


def pad_masked_rows(gm: GraphModule) -> None:
    """Rewrite every `x[mask]` that leads to sums over its rows.  What cannot be rewritten stays, to be refused."""
    picks = [n for n in gm.graph.nodes if _mask_of(n) is not None]
    if not picks:
        return
    after = facts.descendants(picks)
    prover = Prover(gm)
    prover.walk(skip=after)
    groups: dict[Any, Rows] = {}
    numbers = alike(gm)
    for pick in picks:
        rows = _rows(pick, prover.known, numbers)
        if rows is None:
            return
        groups.setdefault(rows.key, rows).picks.append(pick)
    try:
        for number, rows in enumerate(groups.values()):
            Padding(Picked(gm, rows, after), number).run()
    except Unfit:
        return
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _mask_of(node: Node) -> Node | None:
    """The mask by which a node picks rows."""
    if node.target is aten.masked_select.default:
        mask = node.args[1]
        return mask if isinstance(mask, Node) else None
    if node.target is not aten.index.Tensor:
        return None
    given = [n for n in node.args[1] if n is not None]  # type: ignore[union-attr]
    only = given[0] if len(given) == 1 else None
    return only if isinstance(only, Node) and only.meta["val"].dtype is torch.bool else None


def _rows(pick: Node, known: Mapping[Node, Result], numbers: Mapping[Node, int]) -> Rows | None:
    """The rows of a pick; None if x and its mask do not hold the samples in the same place."""
    mask, x = _mask_of(pick), pick.args[0]
    assert isinstance(mask, Node)
    assert isinstance(x, Node)
    if mask not in known or x not in known or known[mask].reduced or known[x].reduced:
        return None  # picked from rows that a mask has picked, or from a statistic
    own, other = known[mask].axes, known[x].axes
    if isinstance(own, tuple) or isinstance(other, tuple):
        return None
    shape = None
    if pick.target is aten.masked_select.default:
        shape = tuple(torch.broadcast_shapes(x.meta["val"].shape, mask.meta["val"].shape))
        more, less = len(shape) - mask.meta["val"].ndim, len(shape) - x.meta["val"].ndim
        own = None if own is None else SampleAxis(own.dim + more, own.outer, own.inner)
        other = None if other is None else SampleAxis(other.dim + less, other.outer, other.inner)
        if own != other:
            return None
        if shape == tuple(mask.meta["val"].shape) == tuple(x.meta["val"].shape):
            shape = None  # `x[mask]`
    place, width = pick_place(pick), len(shape) if shape else mask.meta["val"].ndim
    if own is not None and other != SampleAxis(own.dim + place, own.outer, own.inner):
        return None
    if own is None and other is not None and place <= other.dim < place + width:
        return None
    named = None if shape is None else tuple(str(s) for s in shape)
    return Rows((numbers[mask], named), mask, own, [], shape)
