"""The cells of what is told of sites and plans, and tables that have all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from tabulate import tabulate

from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.algebra.network import BATCH
from psg_fx.algebra.site import Site
from psg_fx.planner.cost import Work
from psg_fx.planner.crossover import crossover
from psg_fx.planner.expr import ContractExpr, Expr, peak_bytes
from psg_fx.planner.expr import seconds as predicted
from psg_fx.planner.plan import ParameterPlan, Part, Plan

_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


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
    return [
        site.name, site.op, ", ".join(used.get(site.name, [])) or "none reaches the loss",
        shape_text(site.output.shape, site.batch), str(site.output.samples), source_of(site),
    ]  # fmt: skip


def sites_table(sites: Sequence[Site], plan: Plan) -> str:
    """Where parameters meet data, every site by itself."""
    used = uses(plan)
    return tabulate([site_cells(site, used) for site in sites], SITE_HEADERS, tablefmt="simple")


def source_of(site: Site) -> str:
    """`model.py:12: h = self.fc(x)`, without the line's comment."""
    text = site.where.split(";  ", 1)[-1].split("  #", 1)[0]
    return text if len(text) <= 60 else text[:59] + "…"


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
            cells = [name, parameter_shape(parameter.gradient), "", "0", *[""] * (len(PLAN_HEADERS) - 5), parameter.why]
            rows.append(PlanRow(parameter, None, None, cells))
        for index, part in enumerate(parameter.parts):
            cells, seconds = _row(plan, parameter, part, index == 0), times.get((name, index))
            if seconds is not None:
                cells[-2] += f", measured {time_text(seconds)}"
            rows.append(PlanRow(parameter, part, seconds, cells))
    return rows


def plan_table(plan: Plan, times: Mapping[tuple[str, int], float]) -> str:
    """All that is known of the plan; times: measured."""
    rows = plan_rows(plan, times)
    return tabulate([row.cells for row in rows], PLAN_HEADERS, tablefmt="simple", disable_numparse=True)


def parameter_shape(gradient: ParameterGradient) -> str:
    """`32×16`"""
    return "×".join(map(str, gradient.shape)) or "scalar"


def _row(plan: Plan, parameter: ParameterPlan, part: Part, first: bool) -> list[str]:
    flops, moved = symbolic(part.tree)
    sizes = {_name(axis): size for axis, size in part.tree.sizes.items() if "'" not in axis}
    numbers: dict[Any, Any] = {sympy.Symbol(name): size for name, size in sizes.items()}
    whole = parameter.total and part.contraction.terms != ()
    return [
        parameter.gradient.name if first else "",
        parameter_shape(parameter.gradient) if first else "",
        part.contraction.network.equation,
        str(part.tree),
        methods(part.tree),
        f"{_formula(flops)} = {count_text(float(sympy.sympify(flops).subs(numbers)))}",
        f"{count_text(float(sympy.sympify(moved).subs(numbers)))}B",
        f"{count_text(peak_bytes(part.tree))}B",
        time_text(part.seconds),
        parameter.why if whole else " ".join(filter(None, instead(plan, part))) or "-",
    ]


def methods(tree: Expr) -> str:
    """`matmul×2+dot`: what the tree runs, operands first."""
    names = [node.method.name for node in tree.nodes.values() if isinstance(node, ContractExpr)]
    return "+".join(f"{n}×{c}" if c > 1 else n for n, c in Counter(names).items())


def instead(plan: Plan, part: Part) -> tuple[str, str, str]:
    """The best tree of another shape, its methods, and what it would cost, for which size it would be the faster one;
    texts of no characters where there is none.
    """
    for tree, seconds in part.alternatives:
        if str(tree) != str(part.tree) or methods(tree) != methods(part.tree):
            return str(tree), methods(tree), f"{time_text(seconds)}{_border(plan, part, tree)}"
    return "", "", ""


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
    for node in tree.nodes.values():
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


def count_text(value: float) -> str:
    """`1.24M`"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def time_text(seconds: float) -> str:
    """`22 µs`"""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
