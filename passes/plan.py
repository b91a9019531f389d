"""plan: site -> network -> ask -> cheapest tree.  Writes facts, no nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.fx import GraphModule

from ..algebra.asks import Ask
from ..graph import facts
from ..graph.stages import Stage
from ..planner.budget import Budget, plan_within
from ..planner.cost import Device
from ..planner.search import plan_step
from .runner import graph_pass


@graph_pass("plan", before=Stage.MERGED, after=Stage.PLANNED)
def plan(gm: GraphModule, asks: Sequence[Ask], device: Device, size: int, budget: Budget | None = None) -> GraphModule:
    """After: `graph_facts(gm).data["plan"]` says which tree computes each ask of each parameter."""
    info = facts.graph_facts(gm)
    gradients = info.data["gradients"].values()
    if budget is None:
        made = plan_step(gradients, asks, device, info.batch, size)
    else:
        made = plan_within(gm, gradients, asks, device, info.batch, size, budget)
    gm.meta[facts.KEY] = dataclasses.replace(info, data={**info.data, "plan": made})
    return gm
