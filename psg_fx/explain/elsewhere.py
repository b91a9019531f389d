"""The plan of a step for a device that is not here."""

from __future__ import annotations

from torch.fx import GraphModule

from psg_fx.planner import rates
from psg_fx.planner.plan import PLAN, Plan
from psg_fx.planner.search import plan_step


def planned_for(gm: GraphModule, device: str) -> Plan:
    """What would be planned for the same batch on a device of that name, without a bound on memory."""
    here = PLAN.of(gm)
    return plan_step([p.gradient for p in here.parameters], here.asks, rates.named(device), here.batch, here.size)


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
