"""What the page says of a step, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from psg_fx.algebra.members import MEMBERS, members_of
from psg_fx.algebra.site import SITES, Site
from psg_fx.explain import screen
from psg_fx.explain.explain import legend, notes, summary
from psg_fx.explain.html.graphs import NODE, Graphs, op_label
from psg_fx.explain.html.memory import memory
from psg_fx.explain.tables import (
    PLAN_HEADERS,
    SITE_HEADERS,
    PlanRow,
    methods,
    plan_rows,
    site_cells,
    uses,
)
from psg_fx.graph import facts
from psg_fx.graph.history import History
from psg_fx.graph.stages import Stage
from psg_fx.measure.tree_times import measured
from psg_fx.planner.plan import PLAN, Part, Plan
from psg_fx.version import __version__

_ALTERNATIVES = 6
"""Trees that are listed beside the chosen one."""


def content(model: torch.nn.Module, loss_fn: Any, history: History, measure: bool = False) -> dict[str, Any]:
    """Everything on the page.  measure: also time every tree of the plan."""
    graphs = history.graphs
    planned = graphs[Stage.PLANNED.value]
    plan, sites = PLAN.of(planned), SITES.of(planned)
    drawn = Graphs(graphs, [parameter.gradient.name for parameter in plan.parameters])
    stages = [{"name": name, **drawn.stage(gm)} for name, gm in graphs.items()]
    return {
        "about": _about(model, loss_fn, plan),
        "summary": summary(planned, plan, sites),
        "notes": notes(graphs, plan),
        "columns": NODE,
        "stages": stages,
        "texts": drawn.texts.table,
        "classes": {path: name for path, name in drawn.classes.items() if path},
        "passes": _passes(history),
        "sites": _sites(sites, plan, drawn.modules),
        "plan": _plan(plan, measure),
        "memory": _memory(graphs[Stage.TIDIED.value], plan),
    }


def _about(model: torch.nn.Module, loss_fn: Any, plan: Plan) -> dict[str, Any]:
    return {
        "model": type(model).__name__,
        "loss": None if loss_fn is None else getattr(loss_fn, "__name__", type(loss_fn).__name__),
        "batch": plan.samples,
        "part": plan.part,
        "device": plan.device.name,
        "torch": torch.__version__,
        "version": __version__,
        "asked": [str(ask) for ask in plan.asks],
        "seconds": plan.seconds,
    }


def _passes(history: History) -> list[dict[str, Any]]:
    """What every pass took, and which ops it added and removed, as multisets."""
    found, after = [], Counter[str]()
    for step in history.passes:
        before, after = after, after if step.result is None else _ops(step.result.module)
        found.append(
            {
                "name": step.name, "stage": step.after.value, "seconds": step.seconds, "before": step.nodes_before,
                "after": step.nodes_after, "added": (after - before).most_common(),
                "removed": (before - after).most_common(),
            }
        )  # fmt: skip
    return found


def _ops(gm: GraphModule) -> Counter[str]:
    return Counter(op_label(node) if node.op == "call_function" else node.op for node in gm.graph.nodes)


def _sites(sites: tuple[Site, ...], plan: Plan, modules: Mapping[str, str]) -> dict[str, Any]:
    used = uses(plan)
    rows = [
        {
            "name": site.name, "cells": site_cells(site, used), "module": modules.get(site.name, ""),
            "parameters": used.get(site.name, []),
        }
        for site in sites
    ]  # fmt: skip
    short = {"header": SITE_HEADERS, "rows": screen.site_rows(sites, plan)}
    return {"header": SITE_HEADERS, "rows": rows, "short": short}


def _plan(plan: Plan, measure: bool) -> dict[str, Any]:
    times = measured(plan) if measure else {}
    groups = sorted(screen.plan_groups(plan, times), key=lambda group: -group[0])
    rows = [_plan_row(row) for row in plan_rows(plan, times)]
    return {
        "legend": legend(plan).strip(), "header": PLAN_HEADERS, "rows": rows,
        "short": {"header": screen.PLAN_COLUMNS, "groups": [rows for _, rows in groups]},
    }  # fmt: skip


def _plan_row(row: PlanRow) -> dict[str, Any]:
    gradient, part = row.parameter.gradient, row.part
    found: dict[str, Any] = {"parameter": gradient.name, "cells": row.cells, "why": row.parameter.why}
    if part is None:
        return found | {"sites": [], "seconds": 0.0}
    terms = [gradient.terms[k] for k in part.contraction.terms] or gradient.terms
    return found | {
        "sites": list(dict.fromkeys(site for term in terms for site in term.sites)),
        "rules": list(dict.fromkeys(f"{term.rule} of {term.op}" for term in terms)),
        "ask": str(part.ask),
        "network": str(part.contraction.network),
        "equation": part.contraction.network.equation,
        "tree": str(part.tree),
        "method": methods(part.tree),
        "seconds": part.seconds,
        "measured": row.measured,
        "alternatives": _alternatives(part),
    }


def _alternatives(part: Part) -> list[tuple[str, str, float]]:
    """Other trees with their methods and predicted seconds; those that print alike once."""
    found: dict[tuple[str, str], float] = {}
    for tree, seconds in part.alternatives:
        found.setdefault((str(tree), methods(tree)), seconds)
    found.pop((str(part.tree), methods(part.tree)), None)
    return [(tree, method, seconds) for (tree, method), seconds in found.items()][:_ALTERNATIVES]


def _other_sizes(gm: GraphModule, plan: Plan) -> dict[Any, int]:
    """The symbols of the numbers of rows, of groups, and of what the largest ones have, with what they are in the
    plan.
    """
    given = {facts.input_spec(n).name: facts.shape(n.meta["val"]) for n in facts.placeholders(gm)}
    found: dict[Any, int] = {}
    if plan.grouping is not None:
        found |= zip(given[MEMBERS.name], (plan.grouping.groups, plan.grouping.largest), strict=True)
    for axis, (rows, largest) in enumerate(plan.rows):
        found[facts.graph_facts(gm).rows[axis]] = rows
        if largest is not None and axis in plan.gathered:
            found[given[members_of(axis).name][1]] = largest
    return found


def _memory(tidied: GraphModule, plan: Plan) -> dict[str, Any]:
    """Numbers of nodes are those of the stage `tidied`."""
    batch = facts.graph_facts(tidied).batch
    found = memory(tidied, batch, plan.samples, others=_other_sizes(tidied, plan))
    return {
        "live": found.live[:-1],  # the output makes nothing
        "peak": found.peak,
        "largest": [[node.name, size] for node, size in found.largest],
    }
