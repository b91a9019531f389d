"""tidy: the same computation with fewer nodes, so that the graph reads well and compiles fast.

Sizes are written with one node for the batch size, `detach` (which means nothing without autograd) is dropped, and
equal ops on equal arguments become one.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import batch_size
from psg_fx.graph.same_op import merge_equal
from psg_fx.graph.stages import Stage

from .runner import graph_pass

aten = torch.ops.aten


@graph_pass("tidy", before=Stage.LOWERED, after=Stage.TIDIED)
def tidy(gm: GraphModule) -> GraphModule:
    """After: one node computes the batch size, no op is done twice, nothing is detached."""
    _one_batch_size(gm)
    _drop_detach(gm)
    merge_equal(gm)
    gm.graph.eliminate_dead_code()
    return gm


def _one_batch_size(gm: GraphModule) -> None:
    """Write every size that is linear in B with the one node that reads B."""
    batch = facts.graph_facts(gm).batch
    with gm.graph.inserting_after(facts.placeholders(gm)[-1]):
        size = batch_size(gm)
    if size is None:
        return
    size._rename("batch_size")
    made: dict[Any, Node] = {batch: size}
    for node in list(gm.graph.nodes):
        value = node.meta.get("val")
        if node is size or not isinstance(value, torch.SymInt):
            continue
        wanted = facts.expr(value)
        if wanted not in made and (factor := _factor(wanted, batch)) is not None:
            with gm.graph.inserting_before(node):
                made[wanted] = gm.graph.call_function(operator.mul, (size, factor))
            made[wanted].meta["val"] = value
            made[wanted]._rename(f"batch_size_times_{factor}")
        if wanted in made and made[wanted] is not node:
            node.replace_all_uses_with(made[wanted])


def _factor(expression: sympy.Expr, batch: sympy.Symbol) -> int | None:
    """The k of k·B; None for anything else."""
    factor = expression / batch
    return int(factor) if factor.is_Integer else None


def _drop_detach(gm: GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
