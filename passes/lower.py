"""lower: the only pass that writes nodes.  Traces a plain torch function for the plan and splices it into the graph."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from psg_fx import facts
from psg_fx.evaluate import Evaluator
from psg_fx.facts import InputSpec, OutputSpec
from psg_fx.planning import Plan
from psg_fx.quantity import Extra, Quantity
from psg_fx.stages import Stage
from psg_fx.tracing import trace

from .runner import graph_pass


@graph_pass("lower", before=Stage.PLANNED, after=Stage.LOWERED)
def lower(gm: GraphModule, quantities: Sequence[Quantity], dtype: torch.dtype) -> GraphModule:
    """After: outputs are the losses, new buffer values, and every field of every quantity; nothing else is computed.

    dtype: of further inputs whose quantity leaves it open.
    """
    info = facts.graph_facts(gm)
    plan: Plan = info.data["plan"]
    gradients = {p.gradient.name: p.gradient for p in plan.parameters}
    extras = {name: extra for quantity in quantities for name, extra in quantity.extras(gradients).items()}
    made = {name: _extra_node(gm, name, extra, dtype) for name, extra in extras.items()}
    fixed = {n: extra.value.to(made[n].meta["val"].device) for n, extra in extras.items() if extra.value is not None}
    constants = {**info.data["constants"], **fixed}
    gm.meta[facts.KEY] = dataclasses.replace(info, data={**info.data, "constants": constants})
    sources = _sources(plan)
    known = {n: node for n, node in _known_values(gm, made).items() if n in sources}
    names: list[str] = []
    specs: list[OutputSpec] = []
    batch_size = _batch_node(gm)

    def tail(
        values: list[torch.Tensor], given: list[torch.Tensor], carrier: torch.Tensor
    ) -> tuple[list[Any], list[Any]]:
        env = dict(zip(known, values, strict=True))
        count = carrier.shape[facts.input_spec(batch_size).samples or 0]
        evaluator = Evaluator(plan, env, count, carrier.device)
        results = _results(evaluator, quantities, dict(zip(made, given, strict=True)), count)
        specs[:] = [spec for spec, _ in results]
        names[:] = list(evaluator.named)
        return [value for _, value in results], list(evaluator.named.values())

    nodes = [*known.values(), *made.values(), batch_size]
    arguments = [[n.meta["val"] for n in group] for group in (known.values(), made.values())]
    with torch.no_grad():
        traced = trace(tail, (*arguments, batch_size.meta["val"]))
    results, inner = _splice(gm, traced, nodes, len(specs))
    _name(results, specs, inner, names)
    _finish(gm, results, specs)
    return gm


def _results(
    evaluator: Evaluator, quantities: Sequence[Quantity], given: Mapping[str, torch.Tensor], count: Any
) -> list[tuple[OutputSpec, torch.Tensor]]:
    """Norms first, then the weights that follow from them, then everything that reads weights."""
    evaluator.first()
    weights: dict[str, Mapping[str, torch.Tensor]] = {}
    for quantity in quantities:
        weights.update(quantity.weights(evaluator.results, given))
    evaluator.second(weights)
    found: dict[tuple[str, str], torch.Tensor] = {}
    asked = {quantity.field for quantity in quantities}
    for quantity in quantities:
        for field, value in quantity.finish(evaluator.results, weights, count).items():
            if field != quantity.field and field in asked:
                continue  # a by-product (the norms of a clipped sum) gives way to the quantity that is asked for it
            entries = value.items() if isinstance(value, Mapping) else [("", value)]
            found.update({(field, name): tensor for name, tensor in entries})
    return [(OutputSpec(field, name), tensor) for (field, name), tensor in found.items()]


def _known_values(gm: GraphModule, extras: Mapping[str, Node]) -> dict[str, Node]:
    """Names that leaves and prefixes may use -> nodes of the joint graph."""
    found: dict[str, Node] = {f"placeholder:{n.name}": n for n in facts.placeholders(gm)}
    found |= {f"given:{name}": node for name, node in extras.items()}
    for spec, node in zip(facts.graph_facts(gm).outputs, facts.outputs(gm), strict=True):
        if node is not None and spec.kind in ("activation", "cotangent"):
            found[f"{spec.kind}:{spec.name}"] = node
    return found


def _sources(plan: Plan) -> set[str]:
    found: set[str] = set()
    for parameter in plan.parameters:
        for part in parameter.parts:
            found.update(source for leaf in part.contraction.network.leaves for source in leaf.sources)
        for term in parameter.gradient.terms:
            found.update(f"placeholder:{name}" for name in term.prefix.inputs if not term.prefix.trivial)
    return found


def _batch_node(gm: GraphModule) -> Node:
    return next(n for n in facts.placeholders(gm) if facts.input_spec(n).samples is not None)


def _extra_node(gm: GraphModule, name: str, extra: Extra, dtype: torch.dtype) -> Node:
    """A placeholder for a further input, after those there are."""
    last, carrier = facts.placeholders(gm)[-1], _batch_node(gm)
    template = carrier.meta["val"]
    count = template.shape[facts.input_spec(carrier).samples or 0]
    with template.fake_mode:
        shape = [count if size is None else size for size in extra.shape]
        value = torch.empty(shape, dtype=extra.dtype or dtype, device=template.device)
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(re.sub(r"\W", "_", name))
    kind = "given" if extra.value is None else "constant"
    node.meta = {"val": value, "psg_fx_input": InputSpec(kind, name, 0 if None in extra.shape else None)}
    return node


def _splice(gm: GraphModule, traced: GraphModule, inputs: list[Node], count: int) -> tuple[list[Node], list[Node]]:
    """Copy the traced graph in front of the output; its `count` results and named inner nodes, in `gm`."""
    mapping: dict[Node, Node] = dict(zip(facts.placeholders(traced), inputs, strict=True))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                setattr(gm, node.target, getattr(traced, node.target))
            if node.op not in ("placeholder", "output"):
                copy = gm.graph.node_copy(node, mapping.__getitem__)
                copy.meta["psg_fx_pass"] = "lower"
                mapping[node] = copy
    found = [mapping[n] for n in pytree.tree_leaves(traced.graph.output_node().args[0])]
    return found[:count], found[count:]


def _name(results: list[Node], specs: list[OutputSpec], inner: list[Node], names: list[str]) -> None:
    """Name nodes for what they hold."""
    for node, name in zip(inner, names, strict=True):
        _rename(node, name)
    for node, spec in zip(results, specs, strict=True):
        _rename(node, f"{spec.name}_{spec.kind}" if spec.name else spec.kind)


def _rename(node: Node, name: str) -> None:
    if node.op == "call_function":
        node._rename(re.sub(r"\W", "_", name))


def _finish(gm: GraphModule, results: list[Node], specs: list[OutputSpec]) -> None:
    """Keep losses, outputs, buffers and results as outputs; drop everything that only the planner needed."""
    info = facts.graph_facts(gm)
    kept = [
        (spec, node)
        for spec, node in zip(info.outputs, facts.outputs(gm), strict=True)
        if spec.kind not in ("activation", "cotangent")
    ]
    everything = kept + list(zip(specs, results, strict=True))
    gm.graph.output_node().args = (tuple(node for _, node in everything),)
    gm.graph.eliminate_dead_code()
    gm.meta[facts.KEY] = dataclasses.replace(info, outputs=tuple(spec for spec, _ in everything))
