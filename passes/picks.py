"""picks: the gradient of what is picked from each row by its number is computed where it is read, not scattered.

    z[b, k[b]] += ȳ[b], z = 0   ->   z[b, j] = ȳ[b] where k[b] = j, and 0 elsewhere

`scatter_add` fills z with zeros in one kernel and adds to it in another, and what reads z comes after both.  A
comparison is part of whatever kernel reads it: a classifier's loss (`gather` from the logarithms of its softmax)
launches two kernels less.  torch writes the gradient of `nll_loss` in the same way.

A number that no row has is refused by the `gather` from rows of that size, so numbers that nothing is picked by stay
with `scatter_add`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, is_zeros, numbers_along, put_in_place, written_before
from psg_fx.graph.same_op import merge_equal
from psg_fx.graph.stages import Stage

from .runner import graph_pass

aten = torch.ops.aten


@graph_pass("picks", before=Stage.TIDIED, after=Stage.TIDIED)
def picks(gm: GraphModule) -> GraphModule:
    """After: nothing is scattered of which each row has one element that `gather` picked."""
    scattered = [node for node in gm.graph.nodes if node.target is aten.scatter_add.default]
    found = [node for node in scattered if _is_gradient_of_a_pick(*node.args)]
    for node in found:
        with written_before(node, node.meta):
            made = _compared(gm, *node.args)
        put_in_place(node, made)
    if found:
        merge_equal(gm)  # rows of one size have the same places
        gm.graph.eliminate_dead_code()
    return gm


def _is_gradient_of_a_pick(into: Node, dim: int, numbers: Node, values: Node) -> bool:
    """Whether it adds one value to each row of zeros, by numbers that such a row has."""
    whole, one = facts.shape(into.meta["val"]), facts.shape(numbers.meta["val"])
    if not is_zeros(into) or not one or facts.shape(values.meta["val"]) != one:
        return False
    rest = [(a, b) for k, (a, b) in enumerate(zip(whole, one, strict=True)) if k != dim % len(one)]
    if one[dim] != 1 or whole[dim].free_symbols or any(a != b for a, b in rest):
        return False
    picked = [user for user in numbers.users if user.target is aten.gather.default and user.args[2] is numbers]
    return any(facts.shape(_operand(user).meta["val"]) == whole and _dim(user) == dim % len(one) for user in picked)


def _compared(gm: GraphModule, into: Node, dim: int, numbers: Node, values: Node) -> Node:
    here = call(gm, aten.eq.Tensor, numbers, numbers_along(gm, into, dim))
    return call(gm, aten.where.ScalarOther, here, values, 0)


def _operand(gather: Node) -> Node:
    (operand, *_) = gather.all_input_nodes
    return operand


def _dim(gather: Node) -> int:
    dim: Any = gather.args[1]
    return int(dim) % int(_operand(gather).meta["val"].ndim)
