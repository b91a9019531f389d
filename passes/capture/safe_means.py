"""Means of what masks pick, which code takes only where there is something: `x[m].mean() if m.any() else 0`.

    x[m].mean()  ->  x[m].sum() / n, n = torch.ones_like(x[m]).sum();  y / n  ->  y / torch.where(n == 0, 1, n)

Where the mask picks something, this is the same; where it picks nothing, it is a zero divided by one, with derivatives,
where the code has another arm: a zero, mostly, or the rest of a loss.  That this is what the arm gives is seen as of
other arms (`nothing_picked.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import call, written_before

from ..independence.values import bound, op_name
from .emptied import Emptied, is_never_zero

aten = torch.ops.aten


def divide_by_one_for_none(gm: GraphModule, masks: Sequence[Node]) -> None:
    """Rewrite the means, and divisors that are zero, of what these masks pick, if they pick nothing."""
    if not masks:
        return
    empty = Emptied(gm, masks)
    for node in list(gm.graph.nodes):
        copy = empty.of[node]
        if op_name(node) == "aten.mean" and bound(copy)["self"] in empty.no_rows:
            _write_out_mean(gm, node)
        elif op_name(node) == "aten.div" and bound(copy)["other"] in empty.zero:
            _never_by_zero(gm, node)


def _write_out_mean(gm: GraphModule, node: Node) -> None:
    given: dict[str, Any] = bound(node)
    x, how = given["self"], (given.get("dim"), given.get("keepdim", False))
    with written_before(node, node.meta):
        total = call(gm, aten.sum.dim_IntList, x, *how, dtype=given["dtype"])
        count = call(gm, aten.sum.dim_IntList, call(gm, aten.ones_like.default, x), *how, dtype=given["dtype"])
        made = call(gm, aten.div.Tensor, total, _one_for_none(gm, count))
    node.replace_all_uses_with(made)


def _never_by_zero(gm: GraphModule, node: Node) -> None:
    divisor = node.args[1]
    assert isinstance(divisor, Node)
    if not is_never_zero(divisor):
        with written_before(node, node.meta):
            divisor = _one_for_none(gm, divisor)
        node.args = (node.args[0], divisor, *node.args[2:])


def _one_for_none(gm: GraphModule, count: Node) -> Node:
    one = call(gm, aten.ones_like.default, count)
    return call(gm, aten.where.self, call(gm, aten.eq.Scalar, count, 0), one, count)
