"""What a step does, in one screen: the sites, where the samples lie, the plan, its cost, and why not otherwise."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from torch.fx import GraphModule

from psg_fx.algebra.site import SITES, Site
from psg_fx.errors import BadArgument
from psg_fx.explain import screen, tables
from psg_fx.explain.elsewhere import chosen_otherwise, fused_instead, planned_for, unbounded
from psg_fx.explain.tables import methods, time_text
from psg_fx.graph import facts
from psg_fx.graph.stages import Stage
from psg_fx.measure.tree_times import measured
from psg_fx.planner.budget import in_words
from psg_fx.planner.cost import Fused
from psg_fx.planner.expr import rounds
from psg_fx.planner.plan import PLAN, ParameterPlan, Plan

LEGEND = """\
x: input of the op, ȳ: gradient of its output, c: weights of the samples;  b: samples, t: positions, i, o: in, out
a·b: contracted, a²: squared and summed, Σ: summed over positions

"""


_OF_GROUPS = {
    "blocks": "b: groups, r: samples of a group (they lie in order) and positions",
    "gathered": "b: groups, r: samples of a group (brought in order) and positions",
    "scattered": "b: groups, r: samples, onehot(groups)[r,b]: which are in which, t: positions",
}
"""What the axes of a plan for groups of samples are, by layout."""


_CLEARLY = 0.95
"""What part of another's time is worth a word."""


def legend(plan: Plan) -> str:
    """What the letters of the plan table mean."""
    if plan.rows:
        what = "sample" if plan.grouping is None else "group"
        of_rows = LEGEND.replace("over positions", f"over positions;  r: rows of a {what}")
        return of_rows.replace("of the samples", f"of the {what}s").replace("b: samples", f"b: {what}s")
    if plan.grouping is None:
        return LEGEND
    of_groups = LEGEND.replace("weights of the samples", "weights of the groups")
    return of_groups.replace("b: samples, t: positions", _OF_GROUPS[plan.grouping.layout])


def explain(
    graphs: Mapping[str, GraphModule], measure: bool = False, device: str | None = None, wide: bool = False
) -> str:
    """The sites table, the plan table, and what else is worth knowing, as text of 120 columns.

    measure: compile and time every tree with random operands, and show that beside the prediction (seconds a tree).
    device: the plan is the one for the device of that name, and what differs from the step's own is listed.
    wide: every site and parameter has rows of its own, with formulas, flops and bytes, however wide.
    """
    if measure and device is not None:
        raise BadArgument(
            "a plan for another device is not timed", where=f"explain(measure=True, device={device!r})",
            why="what is measured runs on the device of the step", fix="leave out one of the two",
        )  # fmt: skip
    gm = graphs[Stage.PLANNED.value]
    plan, sites = PLAN.of(gm), SITES.of(gm)
    look = tables if wide else screen
    if device is not None:
        there = planned_for(gm, device)
        parts = [
            summary(gm, there, sites),
            f"Plan for {device}: what would be computed of each parameter's gradient, and how\n" + legend(plan)
            + look.plan_table(there, {}),
            _otherwise(plan, there, device), *_fused(gm, there),
        ]  # fmt: skip
    else:
        parts = [
            summary(gm, plan, sites), "Sites: where a parameter meets data\n" + look.sites_table(sites, plan),
            "Plan: what is computed of each parameter's gradient, and how\n" + legend(plan)
            + look.plan_table(plan, measured(plan) if measure else {}),
            *_shared(plan), *_bound(gm, plan), *_fused(gm, plan), *_notes(graphs, plan),
        ]  # fmt: skip
    return "\n\n".join(parts)


def _otherwise(plan: Plan, there: Plan, device: str) -> str:
    rows = chosen_otherwise(plan, there)
    if not rows:
        return "The trees are those that are chosen here."
    headers = ("parameter", "asked", f"here ({plan.device.name})", f"on {device}")
    return "Chosen otherwise than here\n" + screen.table(screen.joined(rows), headers, shrinking=(2, 3, 0))


def _shared(plan: Plan) -> list[str]:
    """Why a tree that is clearly faster by itself was not chosen."""
    parts = [part for parameter in plan.parameters for part in parameter.parts]
    if all(seconds > _CLEARLY * part.seconds for part in parts for _, seconds in part.alternatives):
        return []
    why = "slower in all: rows of a parameter use what others have computed"
    if plan.part is not None:
        why += "; or it has no room in the memory budget"
    return [textwrap.fill(f"An instead may be faster by itself and {why}.", screen.WIDTH)]


def _bound(gm: GraphModule, plan: Plan) -> list[str]:
    """What a memory budget has changed."""
    if plan.part is None:
        return []
    free, need = unbounded(gm, plan)
    told = f"A memory budget holds: {in_words(plan.need)} at once beside parameters and inputs, predicted"
    if plan.cut or need > plan.need or free.seconds != plan.seconds:
        told += f" ({in_words(need)} without it)"
    larger = "run in parts of as many" if plan.cut else "have a plan of their own"
    told = textwrap.fill(f"{told}; batches over {plan.part} samples {larger}.", screen.WIDTH)
    rows = chosen_otherwise(free, plan)
    if not rows:
        return [f"{told}\nNo tree is another one for its sake."]
    headers = ("parameter", "asked", f"without ({time_text(free.seconds)})", f"within ({time_text(plan.seconds)})")
    return [f"{told}\n" + screen.table(screen.joined(rows), headers, shrinking=(2, 3, 0))]


def _fused(gm: GraphModule, plan: Plan) -> list[str]:
    """What the kernels that are off would change, by prediction."""
    rows = [
        (own.gradient.name, _trees(own), _trees(other), time_text(own.seconds), time_text(other.seconds))
        for own, other in fused_instead(gm, plan)
    ]
    if not rows:
        return []
    headers = ("parameter", "trees", "with fused kernels", "time", "predicted")
    table = screen.table(screen.joined(rows), headers, shrinking=(1, 2, 0))
    off = "Fused kernels are off" if plan.device.fused is Fused.NONE else "Not all fused kernels are on"
    return [f'{off}; with options={{"psg_fx.fused_kernels": True}} it would be (predicted)\n{table}']


def _trees(parameter: ParameterPlan) -> str:
    return "; ".join(f"{part.tree} {methods(part.tree)}" for part in parameter.parts)


def summary(gm: GraphModule, plan: Plan, sites: tuple[Site, ...]) -> str:
    """How large the step is, what it was planned for, what is asked, and what that should cost."""
    asked = ", ".join(map(str, plan.asks))
    count = sum(1 for n in gm.graph.nodes if n.op == "call_function")
    size, g = f"B={plan.size}", plan.grouping
    if g is not None:
        size = f"G={g.groups} groups of up to {g.largest} samples, {g.samples} in all,"
    if plan.rows:
        size = f"{size.removesuffix(',')} with {' and '.join(str(rows) for rows, _ in plan.rows)} rows"
    asked_for = f"asked: {asked}; predicted beside forward and backward: {time_text(plan.seconds)}"
    return (
        f"{len(plan.parameters)} parameters at {len(sites)} sites; joint graph of {count} ops\n"
        f"planned for {size} on {plan.device.name} with {plan.device.origin}\n"
        + textwrap.fill(asked_for, screen.WIDTH, subsequent_indent=" " * len("asked: "), break_on_hyphens=False)
    )


def _notes(graphs: Mapping[str, GraphModule], plan: Plan) -> list[str]:
    found = notes(graphs, plan)
    wrapped = [textwrap.fill(f"- {note}", screen.WIDTH, subsequent_indent="  ") for note in found]
    return ["\n".join(["Notes", *wrapped])] if found else []


def notes(graphs: Mapping[str, GraphModule], plan: Plan) -> list[str]:
    """What the passes noted, and the ops without a rule."""
    found = list(facts.graph_facts(graphs[Stage.PLANNED.value]).notes)
    terms = [term for parameter in plan.parameters for term in parameter.gradient.terms]
    fallbacks = sorted({f"{t.op} ({', '.join(t.sites)})" for t in terms if t.rule == "fallback"})
    if fallbacks:
        listed = "; ".join(fallbacks)
        found.append(f"no rule covers these, so vmap(vjp) of the op materialises their gradients: {listed}")
    if plan.device.rounded:
        found.append(_rounded(plan))
    return found


def _rounded(plan: Plan) -> str:
    """Which gradients wait for the norms in bfloat16."""
    names = [(p.gradient.name,) for p in plan.parameters if any(rounds(part.tree) for part in p.parts)]
    if not names:
        return "no gradient is kept in bfloat16: none in float32 waits for the norms, or others are faster"
    listed = ", ".join(name for (name,) in screen.joined(names))
    kept = f"{len(names)} gradients are" if len(names) > 1 else "one gradient is"
    return f"{kept} kept in bfloat16 until the norms are known, which are those of what is kept: {listed}"
