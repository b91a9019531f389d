"""Values that a mask places, `x.masked_scatter(mask, values)`, `x[mask] = values`: features of images in place of the
tokens that stand for them.

Places are counted through all samples, so that a sample's values go where another one's belong as soon as one sample
has more places than values.  Where each has as many of both, which is checked at every call, it is the same for each
sample by itself: place k of a sample takes its value k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.facts import PLACES, OutputSpec
from psg_fx.graph.splicing import splice
from psg_fx.source import locate

aten = torch.ops.aten


def place_by_sample(gm: GraphModule) -> None:
    """Rewrite masked_scatter of samples, and index_put by a mask; rows of samples have no fixed number of places."""
    info = facts.graph_facts(gm)
    for node in [n for n in gm.graph.nodes if n.target in (aten.masked_scatter.default, aten.index_put.default)]:
        given = _given(node, info.batch)
        over = node.target is aten.masked_scatter.default
        sizes = None if given is None or info.rows else _sizes(given, info.batch, over)
        if given is None or sizes is None:
            continue
        placed, wrong = splice(gm, node, sizes.placed, given)
        node.replace_all_uses_with(placed)
        gm.graph.erase_node(node)
        _check(gm, wrong, node)
    gm.graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Sizes:
    """lead: how many dims of x the mask has.  width: how many entries each of its places stands for.  places, values:
    how many one sample has.  over: whether values of a batch of one may be left over.
    """

    lead: int
    width: int
    places: int
    values: int
    over: bool

    def placed(self, x: Tensor, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and whether a sample's values do not go to its own places."""
        dims = self.lead if not self.over else mask.ndim - (x.ndim - self.lead)
        mask = mask.reshape(mask.shape[:dims]).expand(x.shape[: self.lead])
        mask = mask.reshape(-1, self.places)
        number = (mask.cumsum(1) - 1).clamp(0, self.values - 1)
        each = values.reshape(-1, self.values, self.width)
        taken = each.gather(1, number[:, :, None].expand(-1, -1, self.width))
        found = torch.where(mask[:, :, None], taken, x.reshape(-1, self.places, self.width))
        counts = mask.sum(1)
        wrong = (counts != self.values).any()
        if self.over:
            several = torch.ones_like(counts).sum() > 1
            wrong = (counts > self.values).any() | (wrong & several)
        return found.reshape(x.shape), wrong


def _given(node: Node, batch: sympy.Symbol) -> list[Node] | None:
    """x, the mask and the values: of index_put by one mask, as many values as it picks places; None for others."""
    if node.target is aten.masked_scatter.default:
        return [_of(node.args[0]), _unexpanded(node.args[1]), _of(node.args[2])]
    x, picks, values, *accumulate = node.args
    if not isinstance(picks, Sequence) or len(picks) != 1 or any(accumulate) or not isinstance(values, Node):
        return None
    mask = _of(picks[0])
    whole, picked, rows = (facts.shape(_of(n).meta["val"]) for n in (x, mask, values))
    is_mask = mask.meta["val"].dtype is torch.bool and 0 < len(picked) <= len(whole)
    if not is_mask or rows[1:] != whole[len(picked) :] or not rows or not rows[0].has(batch):
        return None  # a value for all places, or as many as another mask picks
    return [_of(x), mask, values]


def _sizes(given: Sequence[Node], batch: sympy.Symbol, over: bool) -> _Sizes | None:
    """None where samples have no fixed sizes, or lie elsewhere than in the first dim."""
    x, mask, values = (facts.shape(node.meta["val"]) for node in given)
    if len(mask) > len(x) or not x or not x[0].has(batch):
        return None
    lead = len(x) if over else len(mask)
    while over and lead > 1 and len(mask) - (len(x) - lead) > 0 and mask[lead - 1 - len(x)] == 1:
        lead -= 1
    width = math.prod(x[lead:], start=sympy.Integer(1))
    counts = [width, math.prod(x[:lead]) / batch, math.prod(values) / batch / width]
    if not all(isinstance(n, sympy.Integer) and n > 0 for n in counts):
        return None
    width, places, each = map(int, counts)
    return _Sizes(lead, width, places, each, over)


def _of(node: Any) -> Node:
    assert isinstance(node, Node)
    return node


def _unexpanded(mask: Any) -> Node:
    """A mask before it is expanded, with as many dims."""
    while mask.target is aten.expand.default and mask.args[0].meta["val"].ndim == mask.meta["val"].ndim:
        mask = mask.args[0]
    return _of(mask)


def _check(gm: GraphModule, wrong: Node, node: Node) -> None:
    """One more output, which is looked at at every call."""
    outputs: Sequence[Any] = gm.graph.output_node().args[0]  # type: ignore[assignment]
    gm.graph.output_node().args = ((*outputs, wrong),)
    info = facts.graph_facts(gm)
    facts.update_graph(
        gm, outputs=(*info.outputs, OutputSpec("check", locate(node), PLACES)),
        notes=(*info.notes, f"checked at every call: each sample has as many places as values ({locate(node)})"),
    )  # fmt: skip
