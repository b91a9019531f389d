"""Rows that stand where a sample has none: what is computed of them counts nothing, also where it is not finite.

`out[m] = torch.log(h[m] - 1) * w`, m = h > 1: where a sample has no such row, f is computed of some number, and zero
times what is not finite is no zero.  Derivatives reach such a number's row through nothing but the parameters that f
is computed with.  So there such rows are ones, and so is what comes of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.finite import stays_finite
from psg_fx.graph.splicing import splice


def count_nothing(gm: GraphModule, rows: Mapping[Node, SampleAxis], has_rows: Callable[[], Node]) -> None:
    """Have rows of samples that have none, if something may not be finite there, met no parameter but as ones.

    rows: the values of all rows -> where these lie in them.  has_rows: writes `[N]`, whether the sample of each row has
    any.
    """
    if all(map(stays_finite, rows)):
        return
    has = has_rows()
    parameters = [node for node in facts.placeholders(gm) if facts.input_spec(node).kind == "parameter"]
    learned = facts.descendants(parameters) | {*parameters}
    meeting = [node for node in rows if any(n in learned and n not in rows for n in node.all_input_nodes)]
    for node in meeting:
        for given in [n for n in node.all_input_nodes if n in rows and _has_derivative(n)]:
            node.replace_input_with(given, _ones_elsewhere(gm, node, given, rows[given], has))
        for made in [n for n in (node, *node.users) if n in rows and (n is node or n.target is operator.getitem)]:
            if _has_derivative(made):
                users = list(made.users)
                kept = _ones_elsewhere(gm, made.next, made, rows[made], has)
                for user in users:
                    user.replace_input_with(made, kept)


def _has_derivative(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and facts.is_differentiable(value)


def _ones_elsewhere(gm: GraphModule, place: Node, node: Node, axis: SampleAxis, has: Node) -> Node:
    """A value of rows, before a node, that is one where the sample of a row has none."""

    def run(x: Tensor, has: Tensor) -> Tensor:
        each = has.view(1, -1, 1).expand(axis.outer, has.shape[0], axis.inner).reshape(-1)
        own = each.view([-1 if d == axis.dim else 1 for d in range(x.ndim)])
        return torch.where(own, x, torch.ones((), dtype=x.dtype, device=x.device))

    found: Node = splice(gm, place, run, [node, has])
    return found
