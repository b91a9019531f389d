"""plan: site -> network -> ask -> cheapest tree.  Writes facts, no nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.algebra.members import GROUPS, Belonging, Grouping, Memberships
from psg_fx.graph import facts
from psg_fx.graph.stages import Stage
from psg_fx.planner.budget import Budget, plan_within
from psg_fx.planner.cost import Device
from psg_fx.planner.plan import PLAN
from psg_fx.planner.search import plan_step

from .runner import graph_pass


@graph_pass("plan", before=Stage.MERGED, after=Stage.PLANNED)
def plan(
    gm: GraphModule, asks: Sequence[Ask], device: Device, size: int, budget: Budget | None = None,
    grouping: Grouping | None = None, rows: Sequence[tuple[int, int | None]] = (),
) -> GraphModule:  # fmt: skip
    """After: `PLAN` says which tree computes each ask of each parameter, of samples or of groups of them.

    rows: of each axis of rows, how many there are in the call that is planned for, and how many the largest sample
    (or group) has if they are brought in order.
    """
    known, gradients, samples = facts.graph_facts(gm), list(GRADIENTS.of(gm).values()), size
    batch = known.batch
    axes = {known.rows[k]: Belonging.of_rows(k, *sizes, grouped=grouping is not None) for k, sizes in enumerate(rows)}
    if grouping is not None:
        axes[batch] = Belonging.of_samples(grouping)
        batch, size = GROUPS, max(grouping.groups, 2)  # an axis of size 1 would have no role in a contraction
    if axes:
        gradients = list(map(Memberships(axes, batch, size).gradient, gradients))
    if budget is None:
        made = plan_step(gradients, asks, device, batch, size)
    else:
        made = plan_within(gm, gradients, asks, device, batch, size, budget, samples / size)
    PLAN.put(gm, replace(made, grouping=grouping, rows=tuple(rows)))
    return gm
