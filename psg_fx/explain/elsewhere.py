"""The plan of a step as it would be: for a device that is not here, without a bound on memory, with fused kernels."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from psg_fx.planner import rates
from psg_fx.planner.budget import memory_of
from psg_fx.planner.cost import OF_STEPS, Device, Fused
from psg_fx.planner.expr import ContractExpr, Expr
from psg_fx.planner.methods import FUSED
from psg_fx.planner.plan import PLAN, ParameterPlan, Plan
from psg_fx.planner.search import plan_step

_LEAST = 1e-6
"""Seconds from which on a gain is worth telling."""


def planned_for(gm: GraphModule, device: str) -> Plan:
    """What would be planned for the same batch on a device of that name, without a bound on memory."""
    here = PLAN.of(gm).device
    return _planned(gm, replace(rates.named(device), **{name: getattr(here, name) for name in OF_STEPS}))


def _planned(gm: GraphModule, device: Device, size: int | None = None) -> Plan:
    here = PLAN.of(gm)
    found = plan_step([p.gradient for p in here.parameters], here.asks, device, here.batch, size or here.size)
    return replace(found, grouping=here.grouping, rows=here.rows)


def unbounded(gm: GraphModule, plan: Plan) -> tuple[Plan, int]:
    """What would be planned without a bound on memory, and the bytes that the whole batch would need at once."""
    free = _planned(gm, plan.device)
    whole = _planned(gm, plan.device, plan.cut) if plan.cut else free
    return free, memory_of(gm, whole, plan.cut or plan.samples)


def fused_instead(gm: GraphModule, plan: Plan) -> list[tuple[ParameterPlan, ParameterPlan]]:
    """Where a plan without kernels of psg_fx would gain a microsecond by them: how it is, and how it would be."""
    there = _planned(gm, replace(plan.device, fused=Fused.ALL))
    if plan.device.fused is Fused.ALL or there.device.offered is Fused.NONE:
        return []
    pairs = zip(plan.parameters, there.parameters, strict=True)
    gaining = [(own, other) for own, other in pairs if own.seconds - other.seconds >= _LEAST]
    return [(own, other) for own, other in gaining if any(_is_fused(part.tree) for part in other.parts)]


def _is_fused(tree: Expr) -> bool:
    return any(isinstance(node, ContractExpr) and node.method in FUSED for node in tree.nodes.values())


def chosen_otherwise(here: Plan, there: Plan) -> list[tuple[str, str, str, str]]:
    """(parameter, ask, tree here, tree there) wherever the two plans differ."""
    found = []
    for own, other in zip(here.parameters, there.parameters, strict=True):
        asks = dict.fromkeys(part.ask for part in (*own.parts, *other.parts))
        for ask in asks:
            trees = [[str(part.tree) for part in plan.parts if part.ask == ask] for plan in (own, other)]
            if trees[0] != trees[1]:
                name = own.gradient.name
                left, right = (", ".join(each) or "from the gradients" for each in trees)
                found.append((name, str(ask), left, right))
    return found
