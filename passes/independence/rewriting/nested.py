"""Rows that a mask picks from rows that another one has picked, by one mask: `h = x[m]; h[p]`.

    H = 0, H[m] = h;  M = False, M[m] = p;  h[p] = H[M]
    l[p] = v:  L = 0, L[m] = l;  L[M] = v;  L[m]

The rows are the same, in the same order.  Then each mask picks from rows of all samples, for `selected.py` and
`masked.py`: losses of valid rows of which the largest count, classes of which some weigh more.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, written_before

from .picked import said_once

aten = torch.ops.aten


def pick_once(gm: GraphModule) -> None:
    """Rewrite every pick from picked rows, and every write into such rows of what was picked from them."""
    masks = [mask for node in gm.graph.nodes if (mask := mask_by(node)) is not None]
    if len(set(masks)) < 2:
        return
    said_once(gm, masks)
    nested = _Nested(gm)
    for node in list(gm.graph.nodes):
        if (mask := mask_by(node)) is not None:
            nested.see(node, mask)
    if nested.whole:
        gm.graph.eliminate_dead_code()
        gm.recompile()


class _Nested:
    """picked: an unknown number of rows -> the mask that picks them.  whole: a mask of picked rows -> that of all."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.picked: dict[sympy.Expr, Node] = {}
        self.whole: dict[Node, Node] = {}

    def see(self, node: Node, mask: Node) -> None:
        x: Any = node.args[0]
        writes = node.target is aten.index_put.default
        outer = self.by(mask)
        if outer is None or self.by(x) is not outer or not all(map(has_known_rest, (x, mask))):
            if not writes:
                self.picked.setdefault(_rows(node), mask)
        elif not writes:
            with written_before(node, node.meta):
                whole = self.whole.setdefault(mask, put_back(self.gm, mask, outer))
                made = self.pick(put_back(self.gm, x, outer), whole, node)
            self.picked.setdefault(_rows(node), whole)
            node.replace_all_uses_with(made)
        elif mask in self.whole and self.by(node.args[2]) is self.whole[mask]:
            with written_before(node, node.meta):
                onto = put_back(self.gm, x, outer)
                onto = call(self.gm, aten.index_put.default, onto, [self.whole[mask]], *node.args[2:])
                made = self.pick(onto, outer, node)
            node.replace_all_uses_with(made)

    def by(self, rows: Any) -> Node | None:
        """The mask that picks a node's rows."""
        size = _rows(rows)
        return self.picked.get(size) if size is not None and not size.is_number else None

    def pick(self, x: Node, mask: Node, like: Node) -> Node:
        """x[mask], as many rows as there."""
        made = self.gm.graph.call_function(aten.index.Tensor, (x, [mask]))
        made.meta["val"] = like.meta["val"]
        return made


def put_back(gm: GraphModule, rows: Node, mask: Node) -> Node:
    """Zeros, with the rows where the mask has picked them, where the graph inserts."""
    value = rows.meta["val"]
    like = mask
    for _ in value.shape[1:]:
        like = call(gm, aten.unsqueeze.default, like, -1)
    like = call(gm, aten.expand.default, like, [*[-1] * mask.meta["val"].ndim, *value.shape[1:]])
    zeros = call(gm, aten.full_like.default, like, 0, dtype=value.dtype)
    return call(gm, aten.index_put.default, zeros, [mask], rows)


def has_known_rest(node: Any) -> bool:
    """Whether the sizes of each row are numbers."""
    return all(size.is_number for size in facts.shape(node.meta["val"])[1:])


def mask_by(node: Node) -> Node | None:
    """The mask by whose values a node picks rows of the first dims of a tensor, or writes them."""
    if node.op != "call_function":
        return None
    if node.target is aten.masked_select.default:
        x, mask = node.args
        same = facts.shape(x.meta["val"]) == facts.shape(mask.meta["val"])  # type: ignore[union-attr]
        return mask if same else None  # type: ignore[return-value]
    if node.target not in (aten.index.Tensor, aten.index_put.default):
        return None
    picks: Any = node.args[1]
    is_mask = len(picks) == 1 and picks[0].meta["val"].dtype is torch.bool
    return picks[0] if is_mask else None


def _rows(node: Any) -> sympy.Expr | None:
    """The size of the first dim."""
    shape = facts.shape(node.meta["val"])
    return shape[0] if shape else None
