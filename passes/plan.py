"""plan: site -> network -> ask -> cheapest tree.  Writes facts, no nodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.graph import facts
from psg_fx.graph.stages import Stage
from psg_fx.planner.budget import Budget, plan_within
from psg_fx.planner.cost import Device
from psg_fx.planner.plan import PLAN
from psg_fx.planner.search import plan_step

from .runner import graph_pass


@graph_pass("plan", before=Stage.MERGED, after=Stage.PLANNED)
def plan(gm: GraphModule, asks: Sequence[Ask], device: Device, size: int, budget: Budget | None = None) -> GraphModule:
    """After: `PLAN` says which tree computes each ask of each parameter."""
    batch, gradients = facts.graph_facts(gm).batch, GRADIENTS.of(gm).values()
    if budget is None:
        made = plan_step(gradients, asks, device, batch, size)
    else:
        made = plan_within(gm, gradients, asks, device, batch, size, budget)
    PLAN.put(gm, made)
    return gm
