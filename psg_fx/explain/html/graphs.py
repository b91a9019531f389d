"""The graph of every stage as plain data: what the page draws, and what its panel says of a node.

A late stage has thousands of nodes that share most of their texts, so a node is a row of numbers, and its texts lie in
one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.algebra.site import SITES, Site
from psg_fx.explain.html.modules import PER_SAMPLE, Position, class_names, places
from psg_fx.explain.tables import shape_text
from psg_fx.graph import facts
from psg_fx.graph.facts import OutputSpec, fact
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.stages import Stage
from psg_fx.source import source_line
from psg_fx.tensors import short_name

NODE = ("name", "op", "value", "samples", "proof", "source", "group", "role", "site", "cotangent", "origin", "inputs")
"""The columns of a node.  All but group and inputs are places in the table of texts; inputs are numbers of nodes."""

Stages = Mapping[str, GraphModule]
Returned = tuple[OutputSpec | None, Node | None]
"""What an entry of a graph's output holds, if the graph says it, and its node."""


class Texts:
    """A table of texts without doubles."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        """The place of a text."""
        return self._places.setdefault(text, len(self._places))

    @property
    def table(self) -> list[str]:
        """All of them, in order of place."""
        return list(self._places)


class Graphs:
    """Turns the graphs of one step into data, stage by stage."""

    def __init__(self, graphs: Stages, parameters: Iterable[str]) -> None:
        planned = graphs[Stage.PLANNED.value]
        self.texts = Texts()
        self._batch = facts.graph_facts(planned).batch
        self._parameters = list(parameters)
        self._sites: dict[str, Site] = {site.name: site for site in SITES.of(planned)}
        self._cotangents = _cotangents(planned)
        self._results = {
            node.name: spec for spec, node in facts.returned(graphs[Stage.TIDIED.value]) if node is not None
        }
        self.modules = site_modules(graphs[Stage.SITED.value])
        self.classes = class_names(graphs[Stage.CAPTURED.value])

    def stage(self, gm: GraphModule) -> dict[str, Any]:
        """`{"groups": [[phase, module]], "nodes": rows of NODE}`; a result that has a name is a node of its own."""
        specs = self._specs(gm)
        returned = {node: spec for spec, node in specs if node is not None and spec is not None}
        of_sites = {name: self.modules.get(site, "") for name, site in self._cotangents.items()}
        where = places(gm, returned, self._parameters, of_sites)
        nodes = [node for node in gm.graph.nodes if node.op != "output"]
        number = {node: index for index, node in enumerate(nodes)}
        groups: dict[Position, int] = {}
        rows = [self._row(node, groups.setdefault(where[node], len(groups)), number, where[node]) for node in nodes]
        rows += self._returned(specs, number)
        return {"groups": [[place.phase, place.module] for place in groups], "nodes": rows}

    def _row(self, node: Node, group: int, number: Mapping[Node, int], place: Position) -> list[Any]:
        known = fact(node)
        origin = _origin(node)
        site = known.site or (origin if origin in self._sites else "")
        texts = (
            node.name, op_label(node), self._value(node), _samples(node), known.proof, _source(node), group,
            _role(node, site, place), site, self._cotangents.get(node.name, ""), origin,
        )  # fmt: skip
        inputs = sorted({number[n] for n in node.all_input_nodes})
        return [*(t if isinstance(t, int) else self.texts(t) for t in texts), inputs]

    def _returned(self, specs: list[Returned], number: Mapping[Node, int]) -> list[list[Any]]:
        """One node for each kind of result, which reads all that are of this kind."""
        by_kind: dict[str, list[int]] = {}
        for spec, node in specs:
            if node is not None:
                by_kind.setdefault(spec.label if spec else "for the backward", []).append(number[node])
        rows = []
        for kind, inputs in by_kind.items():
            told = f"{len(inputs)} values" if len(inputs) > 1 else "result"
            values = {"name": kind, "op": "output", "value": told, "role": "output"}
            row: list[Any] = [self.texts(values.get(column, "")) for column in NODE]
            row[NODE.index("group")], row[NODE.index("inputs")] = -1, sorted(set(inputs))
            rows.append(row)
        return rows

    def _specs(self, gm: GraphModule) -> list[Returned]:
        """What the graph returns.  The halves of a split step do not say it: results keep their names in `tidied`, and
        what else the forward returns is for the backward.
        """
        if facts.KEY in gm.meta:
            return [*facts.returned(gm)]
        return [(self._results.get(n.name), n) for n in facts.outputs(gm) if isinstance(n, Node)]

    def _value(self, node: Node) -> str:
        """`float32 [B, 12, 16]`"""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return shape_text((facts.expr(value),), self._batch)[1:-1]
        return ", ".join(
            f"{short_name(t.dtype)} {shape_text(facts.shape(t), self._batch)}" for t in facts.tensors(value)
        )


def op_label(node: Node) -> str:
    """`aten.addmm.default`, `getitem`; for an input what it holds."""
    if node.op == "placeholder":
        spec = node.meta.get("psg_fx_input")
        return f"{spec.kind} {spec.name}" if spec is not None else "kept from the forward"
    return str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", str(node.target))


def site_modules(sited: GraphModule) -> dict[str, str]:
    """Site -> the path of the module that runs it."""
    where = places(sited, {}, (), {})
    return {fact(node).site: where[node].module for node in sited.graph.nodes if fact(node).site}


def _cotangents(planned: GraphModule) -> dict[str, str]:
    """Name of a node -> the site whose ȳ it is."""
    return {
        node.name: spec.name.rpartition(".")[0]
        for spec, node in facts.returned(planned)
        if node is not None and spec.kind == "cotangent"
    }


def _source(node: Node) -> str:
    """The user's line without its comment."""
    return source_line(node).split("  #", 1)[0]


def _samples(node: Node) -> str:
    if node.op == "placeholder":
        spec = node.meta.get("psg_fx_input")
        return "" if spec is None or spec.samples is None else f"dim {spec.samples}"
    axes = fact(node).samples
    if not isinstance(axes, tuple):
        return str(axes) if axes is not None else "none" if fact(node).proof else ""
    return ", ".join(str(axis) if axis is not None else "none" for axis in axes)


def _origin(node: Node) -> str:
    """The node of the stage `sited` from which differentiate traced this one."""
    trail = node.meta.get("from_node")
    return trail[-1].name if trail and trail[-1].pass_name.startswith("Interpreter") else ""


def _role(node: Node, site: str, place: Position) -> str:
    if isinstance(node.meta.get("val"), torch.SymInt):
        return "size"
    if node.op == "placeholder":
        spec = node.meta.get("psg_fx_input")
        return "parameter" if spec is not None and spec.kind in ("parameter", "buffer", "constant") else "input"
    if site and not is_view(node):  # what stands around the op of a site once differentiate has traced it
        return "site"
    return "per-sample" if place.phase == PER_SAMPLE else place.phase
