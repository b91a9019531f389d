"""Values that code takes apart along a dim and puts together again, as `torch.cat(list(x))` does: what that is at once.

How many parts there are follows the number of samples, so that captures at several batch sizes would differ.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import call, written_before

from ..independence.arguments import dim_of

aten = torch.ops.aten
JOINING = (aten.cat.default, aten.stack.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


def put_together(gm: GraphModule) -> None:
    """Rewrite each cat or stack of all parts of one value, in their order."""
    for node in [n for n in gm.graph.nodes if n.target in JOINING]:
        parts, dim = node.args[0], dim_of(node, node.meta["val"].ndim)
        whole = _whole(parts)
        if whole is None:
            continue
        with written_before(node, node.meta):
            found = _joined(gm, whole, node, dim)
        if found is not None:
            node.replace_all_uses_with(found)
    gm.graph.eliminate_dead_code()


def _whole(parts: Any) -> Node | None:
    """What took a value apart, if these are all its parts in their order."""
    if not all(isinstance(p, Node) and p.target is operator.getitem for p in parts):
        return None
    sources = {p.args[0] for p in parts}
    source = sources.pop()
    if sources or [p.args[1] for p in parts] != list(range(len(source.meta["val"]))):
        return None
    return source if source.target in (aten.unbind.int, *_SPLITS) else None


def _joined(gm: GraphModule, source: Node, node: Node, dim: int) -> Node | None:
    """The same of the value itself; None where the parts lie along one dim, and are put together along another."""
    value: Any = source.args[0]
    ndim = value.meta["val"].ndim
    if source.target is not aten.unbind.int:
        along = dim_of(source, ndim)
        return value if node.target is aten.cat.default and along == dim else None
    order = list(range(ndim))
    order.insert(dim, order.pop(dim_of(source, ndim)))
    moved = value if order == sorted(order) else call(gm, aten.permute.default, value, order)
    if node.target is aten.stack.default:
        return moved
    return call(gm, aten.reshape.default, moved, list(node.meta["val"].shape))
