"""Reports as plain data, in base units (seconds, bytes)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from tabulate import tabulate
from torch.fx import GraphModule

from psg_fx.algebra.site import SITES, Site
from psg_fx.explain.explain import notes
from psg_fx.explain.tables import methods, uses
from psg_fx.graph import facts
from psg_fx.graph.stages import Stage
from psg_fx.measure.tree_times import measured
from psg_fx.planner.expr import peak_bytes
from psg_fx.planner.plan import PLAN, ParameterPlan
from psg_fx.reference.validate import ValidationReport
from psg_fx.source import source_line
from psg_fx.tensors import short_name


def explained(graphs: Mapping[str, GraphModule], measure: bool = False) -> dict[str, Any]:
    """What `step.explain()` shows: sites, plan and notes.  measure: with measured seconds of every part."""
    gm = graphs[Stage.PLANNED.value]
    plan, sites, batch = PLAN.of(gm), SITES.of(gm), facts.graph_facts(gm).batch
    times, used = measured(plan) if measure else {}, uses(plan)
    return {
        "batch": plan.size,
        "part": plan.part,
        "device": plan.device.name,
        "asked": [str(ask) for ask in plan.asks],
        "seconds": plan.seconds,
        "sites": [_site(site, used.get(site.name, []), batch) for site in sites],
        "plan": [row for parameter in plan.parameters for row in _parts(parameter, times)],
        "notes": notes(graphs, plan),
    }


def _site(site: Site, parameters: list[str], batch: Any) -> dict[str, Any]:
    return {
        "site": site.name,
        "op": site.op,
        "parameters": parameters,
        "output": _shape(site.output.shape, batch),
        "samples": str(site.output.samples),
        "source": site.where,
    }


def _parts(parameter: ParameterPlan, times: Mapping[tuple[str, int], float]) -> list[dict[str, Any]]:
    """What is computed of one parameter's gradient, in order."""
    name, rows = parameter.gradient.name, []
    for index, part in enumerate(parameter.parts):
        work = [node.work() for node in part.tree.nodes.values()]
        rows.append(
            {
                "parameter": name,
                "shape": list(parameter.gradient.shape),
                "asked": part.contraction.network.equation,
                "tree": str(part.tree),
                "method": methods(part.tree),
                "flops": sum(int(w.flops) for w in work),
                "moved_bytes": sum(int(w.read + w.written) for w in work),
                "peak_bytes": int(peak_bytes(part.tree)),
                "seconds": part.seconds,
                "instead": [{"tree": str(t), "method": methods(t), "seconds": s} for t, s in part.alternatives],
            }
        )
        if (name, index) in times:
            rows[-1]["measured_seconds"] = times[name, index]
    return rows


def validated(report: ValidationReport) -> dict[str, Any]:
    """A validation report; an error that is not finite is null, as JSON has no such number."""
    rows = [asdict(row) for row in report.rows]
    for row in rows:
        row |= {key: None for key in ("max_error", "noise") if not math.isfinite(row[key])}
    return {
        "ok": report.ok,
        "tolerance": report.tolerance,
        "rows": rows,
        "vmap": report.vmap,
        "notes": list(report.notes),
    }


def stages(graphs: Mapping[str, GraphModule]) -> list[dict[str, Any]]:
    """Every stage with its number of nodes and of ops, in order."""
    return [
        {
            "stage": name,
            "nodes": len(gm.graph.nodes),
            "ops": sum(node.op == "call_function" for node in gm.graph.nodes),
        }
        for name, gm in graphs.items()
    ]


def stages_table(graphs: Mapping[str, GraphModule]) -> str:
    """The same as a table."""
    return tabulate([list(row.values()) for row in stages(graphs)], headers=["stage", "nodes", "ops"])


def graph(stage: str, gm: GraphModule) -> dict[str, Any]:
    """The nodes of a graph in order: name, op, target, what they read, shape and dtype, line of the user's code."""
    batch = facts.graph_facts(gm).batch
    return {
        "stage": stage,
        "nodes": [
            {
                "name": node.name,
                "op": node.op,
                "target": str(node.target),
                "inputs": [source.name for source in node.all_input_nodes],
                "values": [_value(v, batch) for v in facts.tensors(node.meta.get("val"))],
                "source": source_line(node),
            }
            for node in gm.graph.nodes
        ],
    }


def _value(tensor: torch.Tensor, batch: Any) -> dict[str, Any]:
    return {"shape": _shape(facts.shape(tensor), batch), "dtype": short_name(tensor.dtype)}


def _shape(sizes: Any, batch: Any) -> list[int | str]:
    """Sizes as numbers, or as formulas in B."""
    return [int(s) if str(s).isdecimal() else str(s).replace(str(batch), "B") for s in sizes]
