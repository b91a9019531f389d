"""What a step does, in one screen: the sites, where the samples lie, the plan, its cost, and why not otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
from tabulate import tabulate
from torch.fx import GraphModule

from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.algebra.network import BATCH
from psg_fx.algebra.site import SITES, Site
from psg_fx.explain.elsewhere import chosen_otherwise, fused_instead, planned_for
from psg_fx.graph import facts
from psg_fx.graph.stages import Stage
from psg_fx.measure.tree_times import measured
from psg_fx.planner.cost import Work
from psg_fx.planner.crossover import crossover
from psg_fx.planner.expr import ContractExpr, Expr, peak_bytes
from psg_fx.planner.expr import seconds as predicted
from psg_fx.planner.plan import PLAN, ParameterPlan, Part, Plan

_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
LEGEND = """\
x: input of the op, ȳ: gradient of its output, c: weights of the samples;  b: samples, t: positions, i, o: in and out
a·b: contracted, a²: squared and summed, Σ: summed over positions

"""


_OF_GROUPS = {
    "blocks": "b: groups, r: samples of a group (they lie in order) and positions",
    "gathered": "b: groups, r: samples of a group (brought in order) and positions",
    "scattered": "b: groups, r: samples, onehot(groups)[r,b]: which are in which, t: positions",
}
"""What the axes of a plan for groups of samples are, by layout."""


def legend(plan: Plan) -> str:
    """What the letters of the plan table mean."""
    if plan.grouping is None:
        return LEGEND
    of_groups = LEGEND.replace("weights of the samples", "weights of the groups")
    return of_groups.replace("b: samples, t: positions", _OF_GROUPS[plan.grouping.layout])


def explain(graphs: dict[str, GraphModule], measure: bool = False, device: str | None = None) -> str:
    """The sites table, the plan table, and what else is worth knowing, as text.

    measure: compile and time every tree with random operands, and show that beside the prediction (seconds a tree).
    device: the plan is the one for the device of that name, and what differs from the step's own is listed.
    """
    gm = graphs[Stage.PLANNED.value]
    plan, sites = PLAN.of(gm), SITES.of(gm)
    if device is not None:
        there = planned_for(gm, device)
        rows = chosen_otherwise(plan, there)
        told = tabulate(rows, ("parameter", "asked", f"here ({plan.device.name})", f"on {device}"), tablefmt="simple")
        return "\n\n".join(
            [
                summary(gm, there, sites),
                f"Plan for {device}: what would be computed of each parameter's gradient, and how\n" + legend(plan)
                + _plan(there, measure=False),
                f"Chosen otherwise than here\n{told}" if rows else "The trees are those that are chosen here.",
                *_fused(gm, there),
            ]
        )  # fmt: skip
    return "\n\n".join(
        [
            summary(gm, plan, sites),
            "Sites: where a parameter meets data\n" + _sites(sites, plan),
            "Plan: what is computed of each parameter's gradient, and how\n" + legend(plan) + _plan(plan, measure),
            *_fused(gm, plan),
            *_notes(graphs, plan),
        ]
    )


def _fused(gm: GraphModule, plan: Plan) -> list[str]:
    """What the kernels that are off would change, by prediction."""
    rows = [
        [own.gradient.name, _trees(own), _trees(other), _time(own.seconds), _time(other.seconds)]
        for own, other in fused_instead(gm, plan)
    ]
    if not rows:
        return []
    table = tabulate(rows, ("parameter", "trees", "with fused kernels", "time", "predicted"), tablefmt="simple")
    return [f'Fused kernels are off; with options={{"psg_fx.fused_kernels": True}} it would be (not measured)\n{table}']


def _trees(parameter: ParameterPlan) -> str:
    return "; ".join(f"{part.tree} {methods(part.tree)}" for part in parameter.parts)


def summary(gm: GraphModule, plan: Plan, sites: tuple[Site, ...]) -> str:
    """How large the step is, what it was planned for, what is asked, and what that should cost."""
    asked = ", ".join(map(str, plan.asks))
    count = sum(1 for n in gm.graph.nodes if n.op == "call_function")
    size, g = f"B={plan.size}", PLAN.of(gm).grouping
    if g is not None:
        size = f"G={g.groups} groups of up to {g.largest} samples, {g.samples} in all,"
    return (
        f"{len(plan.parameters)} parameters at {len(sites)} sites; joint graph of {count} ops; "
        f"planned for {size} on {plan.device.name} with {plan.device.origin}\n"
        f"asked: {asked}; predicted beside forward and backward: {_time(plan.seconds)}"
    )


def uses(plan: Plan) -> dict[str, list[str]]:
    """Site -> the parameters that are used there."""
    found: dict[str, list[str]] = {}
    for parameter in plan.parameters:
        for term in parameter.gradient.terms:
            for site in term.sites:
                names = found.setdefault(site, [])
                if parameter.gradient.name not in names:
                    names.append(parameter.gradient.name)
    return found


SITE_HEADERS = ("site", "op", "parameters", "output", "samples", "source")
"""The columns of the sites table."""


def site_cells(site: Site, used: Mapping[str, list[str]]) -> list[str]:
    """The row of one site; used: the parameters of every site."""
    out = site.outputs[0]
    assert out is not None
    return [
        site.name, site.op, ", ".join(used.get(site.name, [])) or "none reaches the loss",
        shape_text(out.shape, site.batch), str(out.samples), _source(site),
    ]  # fmt: skip


def _sites(sites: tuple[Site, ...], plan: Plan) -> str:
    used = uses(plan)
    return tabulate([site_cells(site, used) for site in sites], SITE_HEADERS, tablefmt="simple")


def _source(site: Site) -> str:
    """`model.py:12: h = self.fc(x)`, without the line's comment."""
    return site.where.split(";  ", 1)[-1].split("  #", 1)[0][:60]


def shape_text(shape: tuple[sympy.Expr, ...], batch: sympy.Symbol) -> str:
    """`[B, 12, 16]`"""
    return "[" + ", ".join(_formula(s.subs(batch, sympy.Symbol("B"))) for s in shape) + "]"


PLAN_HEADERS = ("parameter", "shape", "asked", "tree", "method", "flops", "moved", "peak", "time", "instead")
"""The columns of the plan table."""


@dataclass(frozen=True)
class PlanRow:
    """A row of the plan table.  part: None for a parameter that the loss does not reach.  measured: seconds."""

    parameter: ParameterPlan
    part: Part | None
    measured: float | None
    cells: list[str]


def plan_rows(plan: Plan, times: Mapping[tuple[str, int], float]) -> list[PlanRow]:
    """Every row; times: what `measured` found, or nothing."""
    rows = []
    for parameter in plan.parameters:
        name = parameter.gradient.name
        if not parameter.parts:
            cells = [name, _shape_of(parameter.gradient), "", "0", *[""] * (len(PLAN_HEADERS) - 5), parameter.why]
            rows.append(PlanRow(parameter, None, None, cells))
        for index, part in enumerate(parameter.parts):
            cells, seconds = _row(plan, parameter, part, index == 0), times.get((name, index))
            if seconds is not None:
                cells[-2] += f", measured {_time(seconds)}"
            rows.append(PlanRow(parameter, part, seconds, cells))
    return rows


def _plan(plan: Plan, measure: bool) -> str:
    rows = plan_rows(plan, measured(plan) if measure else {})
    return tabulate([row.cells for row in rows], PLAN_HEADERS, tablefmt="simple", disable_numparse=True)


def _shape_of(gradient: ParameterGradient) -> str:
    return "×".join(map(str, gradient.shape)) or "scalar"


def _row(plan: Plan, parameter: ParameterPlan, part: Part, first: bool) -> list[str]:
    flops, moved = symbolic(part.tree)
    sizes = {_name(axis): size for axis, size in part.tree.sizes.items() if "'" not in axis}
    numbers: dict[Any, Any] = {sympy.Symbol(name): size for name, size in sizes.items()}
    return [
        parameter.gradient.name if first else "",
        _shape_of(parameter.gradient) if first else "",
        part.contraction.network.equation,
        str(part.tree),
        methods(part.tree),
        f"{_formula(flops)} = {_count(float(sympy.sympify(flops).subs(numbers)))}",
        f"{_count(float(sympy.sympify(moved).subs(numbers)))}B",
        f"{_count(peak_bytes(part.tree))}B",
        _time(part.seconds),
        _instead(plan, part) if not parameter.total or part.contraction.terms == () else parameter.why,
    ]


def methods(tree: Expr) -> str:
    """`matmul×2+dot`: what the tree runs, operands first."""
    names = [node.method.name for node in tree.nodes().values() if isinstance(node, ContractExpr)]
    return "+".join(f"{n}×{c}" if c > 1 else n for n, c in Counter(names).items())


def _instead(plan: Plan, part: Part) -> str:
    """The best tree of another shape, what it would cost, and for which size it would be the faster one."""
    for tree, seconds in part.alternatives:
        if str(tree) != str(part.tree) or methods(tree) != methods(part.tree):
            return f"{tree} {methods(tree)} {_time(seconds)}{_border(plan, part, tree)}"
    return "-"


def _border(plan: Plan, part: Part, other: Expr) -> str:
    """`, faster below T=204`; nothing where the other tree is slower only because the chosen one is shared."""
    if predicted(part.tree, plan.device) > predicted(other, plan.device):
        return ""
    network = part.contraction.network
    for axis in dict.fromkeys(a for leaf in network.leaves for a in leaf.axes if a != BATCH and "'" not in a):
        border = crossover(network, part.tree, other, axis, plan.batch, plan.size, plan.device)
        if border is not None:
            return f", faster {'below' if border <= part.tree.sizes[axis] else 'from'} {_name(axis)}={border}"
    return ""


def _name(axis: str) -> str:
    return axis.rstrip("'").upper()


def symbolic(tree: Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Flops and bytes moved by the distinct nodes of a tree, in named sizes (B, T, I, O, ...)."""
    flops, moved = sympy.Integer(0), sympy.Integer(0)
    for node in tree.nodes().values():
        work = _symbolic_work(node)
        flops, moved = flops + work.flops, moved + work.read + work.written
    return sympy.expand(flops), sympy.expand(moved)


def _symbolic_work(node: Expr) -> Work:
    sizes = {a: sympy.Integer(1) if s == 1 else sympy.Symbol(_name(a)) for a, s in node.sizes.items()}
    if isinstance(node, ContractExpr):
        return node.method.work(replace(node.pair, sizes=sizes, self_product=False))
    return replace(node, sizes=sizes).work()


def _formula(expression: Any) -> str:
    """`2·B·T²·I` as people write it."""
    text = str(sympy.sympify(expression))
    for digit in "23456":
        text = text.replace(f"**{digit}", digit.translate(_SUPERSCRIPT))
    return text.replace("*", "·")


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _notes(graphs: dict[str, GraphModule], plan: Plan) -> list[str]:
    found = notes(graphs, plan)
    return ["Notes\n" + "\n".join(f"- {note}" for note in found)] if found else []


def notes(graphs: dict[str, GraphModule], plan: Plan) -> list[str]:
    """What the passes noted, and the ops without a rule."""
    found = list(facts.graph_facts(graphs[Stage.PLANNED.value]).notes)
    terms = [term for parameter in plan.parameters for term in parameter.gradient.terms]
    fallbacks = sorted({f"{t.op} ({', '.join(t.sites)})" for t in terms if t.rule == "fallback"})
    if fallbacks:
        listed = "; ".join(fallbacks)
        found.append(f"no rule covers these, so vmap(vjp) of the op materialises their gradients: {listed}")
    return found
