"""Means of what masks pick, which code takes only where there is something: `x[m].mean() if m.any() else 0`.

    x[m].mean()  ->  x[m].sum() / n, n = torch.ones_like(x[m]).sum();  y / n  ->  y / torch.where(m.any(), n, 1)

Where the mask of the branch picks something, this is the same, also if n is zero; where it picks nothing, it is a zero
divided by one, with derivatives, where the code has another arm: a zero, mostly, or the rest of a loss.  That this is
what the arm gives is seen as of other arms (`nothing_picked.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import call, value_of, written_before
from psg_fx.tensors import accumulation_dtype

from ..independence.arguments import bound, op_name
from .emptied import Emptied

aten = torch.ops.aten


def divide_by_one_for_none(gm: GraphModule, branches: Iterable[Sequence[Node]]) -> None:
    """Rewrite the means, and divisors that are zero, of what the masks of a branch pick, where they pick nothing."""
    found: dict[Node, list[Node]] = {}
    for masks in branches:
        empty = Emptied(gm, masks)
        for node in gm.graph.nodes:
            if _is_of_none(node, empty) and masks[0].all_input_nodes[0] < node:
                found.setdefault(node, []).append(masks[0])
    for node, masks in found.items():
        with written_before(node, node.meta):
            if op_name(node) == "aten.mean":
                made = _mean(gm, node, masks)
            else:
                made = call(gm, node.target, node.args[0], _one_for_none(gm, node.args[1], masks), **node.kwargs)
        node.replace_all_uses_with(made)


def _is_of_none(node: Node, empty: Emptied) -> bool:
    """Whether it is a mean of no rows there, or divides by zero."""
    name, copy = op_name(node), empty.of[node]
    if name == "aten.mean":
        return bound(copy)["self"] in empty.no_rows
    return name == "aten.div" and bound(copy)["other"] in empty.zero and len(node.args) == 2


def _mean(gm: GraphModule, node: Node, masks: Sequence[Node]) -> Node:
    """The mean as a sum and a count."""
    given: dict[str, Any] = bound(node)
    x, how = given["self"], (given.get("dim"), given.get("keepdim", False))
    wanted = value_of(node).dtype
    dtype = accumulation_dtype(wanted)
    total = call(gm, aten.sum.dim_IntList, x, *how, dtype=dtype)
    count = call(gm, aten.sum.dim_IntList, call(gm, aten.ones_like.default, x), *how, dtype=dtype)
    made = call(gm, aten.div.Tensor, total, _one_for_none(gm, count, masks))
    return made if dtype is wanted else call(gm, aten._to_copy.default, made, dtype=wanted)


def _one_for_none(gm: GraphModule, count: Any, masks: Sequence[Node]) -> Node:
    """The count, or one where one of the masks picks nothing."""
    conditions = []
    for mask in masks:
        picks = call(gm, aten.sum.default, call(gm, mask.target, *mask.args))
        conditions.append(call(gm, aten.eq.Scalar, picks, 0))
    nothing = functools.reduce(lambda a, b: call(gm, aten.logical_or.default, a, b), conditions)
    return call(gm, aten.where.self, nothing, call(gm, aten.ones_like.default, count), count)
