"""lower: the only pass that writes nodes.  Traces a plain torch function for the plan and splices it into the graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from psg_fx.algebra.network import Kind, Source
from psg_fx.algebra.site import READ, read_by_networks
from psg_fx.graph import facts
from psg_fx.graph.facts import Holds, InputSpec, OutputSpec
from psg_fx.graph.stages import Stage
from psg_fx.planner.plan import PLAN
from psg_fx.quantities.base import Extra, Quantity

from ..runner import graph_pass
from .pieces import rename
from .writer import Writer


@graph_pass("lower", before=Stage.PLANNED, after=Stage.LOWERED)
def lower(gm: GraphModule, quantities: Sequence[Quantity], dtype: torch.dtype) -> GraphModule:
    """After: outputs are the losses, new buffer values, and every field of every quantity; nothing else is computed.

    dtype: of further inputs whose quantity leaves it open.
    """
    plan = PLAN.of(gm)
    gradients = {p.gradient.name: p.gradient for p in plan.parameters}
    extras = {name: extra for quantity in quantities for name, extra in quantity.extras(gradients).items()}
    made = {name: _extra_node(gm, name, extra, dtype) for name, extra in extras.items()}
    fixed = {n: extra.value.to(made[n].meta["val"].device) for n, extra in extras.items() if extra.value is not None}
    facts.update_graph(gm, constants={**facts.graph_facts(gm).constants, **fixed})
    writer = Writer(gm, plan, _batch_node(gm), _known_values(gm, made), made)
    _finish(gm, *_name(writer.results(quantities)))
    return gm


def _known_values(gm: GraphModule, extras: Mapping[str, Node]) -> dict[Source, Node]:
    """What leaves and prefixes may read -> nodes of the joint graph."""
    found = {Source(Kind.PLACEHOLDER, n.name): n for n in facts.placeholders(gm)}
    found |= {Source(Kind.GIVEN, name): node for name, node in extras.items()}
    return found | read_by_networks(gm)


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
    kind: Holds = "given" if extra.value is None else "constant"
    node.meta = {"val": value, "psg_fx_input": InputSpec(kind, name, 0 if None in extra.shape else None)}
    return node


def _name(results: list[tuple[OutputSpec, Node]]) -> tuple[list[Node], list[OutputSpec]]:
    """Results named for what they hold."""
    for spec, node in results:
        rename(node, f"{spec.name}_{spec.label}" if spec.name else spec.label)
    return [node for _, node in results], [spec for spec, _ in results]


def _finish(gm: GraphModule, results: list[Node], specs: list[OutputSpec]) -> None:
    """Keep losses, outputs, buffers and results as outputs; drop everything that only the planner needed."""
    kept = [(spec, node) for spec, node in facts.returned(gm) if spec.kind not in READ]
    everything = kept + list(zip(specs, results, strict=True))
    gm.graph.output_node().args = (tuple(node for _, node in everything),)
    gm.graph.eliminate_dead_code()
    facts.update_graph(gm, outputs=tuple(spec for spec, _ in everything))
