"""statistics: means and deviations that a normalisation has found are not computed again.

    x̂ = norm(x, no weight, no bias)   ->   (x - mean) · rstd     with those of  y, mean, rstd = norm(x, weight, bias)

The gradient of a normalisation's weight is Σ x̂ ȳ, and its formula normalises x once more.  That is two reductions of x
in every layer, and since what multiplies x̂ comes after them, Σ x̂ ȳ cannot be part of the kernel that sums x ȳ for
the backward pass.  With the statistics of the forward pass it can.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, output, put_in_place, written_before
from psg_fx.graph.same_op import merge_equal
from psg_fx.graph.stages import Stage
from psg_fx.tensors import accumulation_dtype

from .runner import graph_pass

aten = torch.ops.aten

_AFFINE: dict[Any, tuple[int, ...]] = {
    aten.native_group_norm.default: (1, 2),
    aten.native_layer_norm.default: (2, 3),
    aten._fused_rms_norm.default: (2,),
}
"""Normalisations by each sample's own statistics, and where weight and bias are among their arguments."""


@graph_pass("statistics", before=Stage.TIDIED, after=Stage.TIDIED)
def statistics(gm: GraphModule) -> GraphModule:
    """After: what is normalised without weight and bias reads the statistics of an earlier normalisation of it."""
    first: dict[Hashable, Node] = {}
    taken = False
    for node in list(gm.graph.nodes):
        if node.target not in _AFFINE:
            continue
        found = first.setdefault(_without_affine(node), node)
        if found is not node and _is_plain(node) and _in_full(found):
            for value in [user for user in node.users if user.target is operator.getitem]:
                _take(gm, node, found, value)
            taken = True
    if taken:
        merge_equal(gm)
        gm.graph.eliminate_dead_code()
    return gm


def _without_affine(node: Node) -> Hashable:
    """What the statistics depend on."""
    arguments = [a for k, a in enumerate(node.args) if k not in _AFFINE[node.target]]
    return (node.target, *(tuple(a) if isinstance(a, list) else a for a in arguments))


def _is_plain(node: Node) -> bool:
    """Whether it has no weight, and nothing but the samples is of a size that is not known."""
    x: Any = node.args[0]
    known = not any(size.free_symbols for size in facts.shape(x.meta["val"])[1:])
    return known and all(node.args[k] is None for k in _AFFINE[node.target])


def _in_full(node: Node) -> bool:
    """Whether its statistics have the precision of sums."""
    x: Any = node.args[0]
    return all(value.dtype is accumulation_dtype(x.meta["val"].dtype) for value in node.meta["val"][1:])


def _take(gm: GraphModule, node: Node, found: Node, value: Node) -> None:
    """One output of a normalisation, from the statistics of another."""
    with written_before(value, value.meta):
        if value.args[1] == 0:
            made = _normalised(gm, node, [output(gm, found, k) for k in range(1, len(found.meta["val"]))])
        else:
            made = output(gm, found, value.args[1])
    put_in_place(value, made)


def _normalised(gm: GraphModule, node: Node, found: list[Node]) -> Node:
    """(x - mean) · rstd, of x · rstd where there is no mean."""
    x: Any = node.args[0]
    like, wide = x.meta["val"], found[-1].meta["val"].dtype
    if like.dtype is not wide:
        x = call(gm, aten._to_copy.default, x, dtype=wide)
    if node.target is aten.native_group_norm.default:
        count, channels, rest, groups = node.args[3:7]
        x = call(gm, aten.reshape.default, x, [count, groups, channels // groups, rest])  # type: ignore[operator]
        found = [call(gm, aten.reshape.default, value, [count, groups, 1, 1]) for value in found]
    *mean, rstd = found
    for value in mean:
        x = call(gm, aten.sub.Tensor, x, value)
    x = call(gm, aten.mul.Tensor, x, rstd)
    if node.target is aten.native_group_norm.default:
        x = call(gm, aten.reshape.default, x, [node.args[3], *map(int, like.shape[1:])])
    return x if like.dtype is wide else call(gm, aten._to_copy.default, x, dtype=like.dtype)
