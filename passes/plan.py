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
from psg_fx.planner.expr import LeafExpr
from psg_fx.planner.plan import PLAN, ParameterPlan, Plan
from psg_fx.planner.search import plan_step

from .runner import graph_pass


@graph_pass("plan", before=Stage.MERGED, after=Stage.PLANNED)
def plan(
    gm: GraphModule, asks: Sequence[Ask], device: Device, size: int, budget: Budget | None = None,
    grouping: Grouping | None = None, rows: Sequence[tuple[int, int | None]] = (),
) -> GraphModule:  # fmt: skip
    """After: `PLAN` says which tree computes each ask of each parameter, of samples or of groups of them.

    rows: of each axis of rows, how many there are in the call that is planned for, and how many the largest sample
    (or group) has if they may be brought in order; then each parameter has the faster of both ways.
    """
    known, gradients, samples = facts.graph_facts(gm), list(GRADIENTS.of(gm).values()), size
    batch = known.batch
    if grouping is not None:
        batch, size = GROUPS, max(grouping.groups, 2)  # an axis of size 1 would have no role in a contraction

    def planned(rows: Sequence[tuple[int, int | None]]) -> Plan:
        axes = {known.rows[k]: Belonging.of_rows(k, *sizes, grouped=grouping is not None)
                for k, sizes in enumerate(rows)}  # fmt: skip
        if grouping is not None:
            axes[known.batch] = Belonging.of_samples(grouping)
        found = list(map(Memberships(axes, batch, size).gradient, gradients)) if axes else gradients
        if budget is None:
            return plan_step(found, asks, device, batch, size)
        return plan_within(gm, found, asks, device, batch, size, budget, samples / max(size, 1))

    made = planned(rows)
    if any(largest is not None for _, largest in rows):
        made = cheaper(made, planned([(count, None) for count, _ in rows]))
    PLAN.put(gm, replace(made, grouping=grouping, rows=tuple(rows)))
    return gm


def cheaper(one: Plan, other: Plan) -> Plan:
    """Of two plans for the same asks, each parameter's faster one, what several read counted once: the copy of a
    cotangent that its layer's weight reads costs its bias nothing.
    """
    chosen: dict[str, ParameterPlan] = {}
    copied: dict[int, float] = {}
    pairs = {a.gradient.name: (a, b) for a, b in zip(one.parameters, other.parameters, strict=True)}

    def seconds(plan: ParameterPlan) -> float:
        return plan.seconds - sum(taken for key, taken in _copies(plan, one.device).items() if key in copied)

    for pair in sorted(pairs.values(), key=lambda pair: -pair[0].seconds):
        best = min(pair, key=seconds)
        copied |= _copies(best, one.device)
        chosen[best.gradient.name] = best
    found = tuple(chosen[name] for name in pairs)
    return replace(one, parameters=found, seconds=sum(parameter.seconds for parameter in found))


def _copies(plan: ParameterPlan, device: Device) -> dict[int, float]:
    """What is copied of the joint graph's values, and how long that takes."""
    nodes = {key: node for part in plan.parts for key, node in part.tree.nodes.items()}
    return {k: node.seconds(device) for k, node in nodes.items() if isinstance(node, LeafExpr) and node.leaf.copied}
