"""lower: the only pass that writes nodes.  Traces a plain torch function for the plan and splices it into the graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.algebra.members import COUNT, IDS, MEMBERS, ids_of, members_of
from psg_fx.algebra.network import Kind, Source
from psg_fx.algebra.site import READ, read_by_networks
from psg_fx.graph import facts
from psg_fx.graph.facts import Holds, InputSpec, OutputSpec
from psg_fx.graph.nodes import rename, size_of
from psg_fx.graph.stages import Stage
from psg_fx.planner.plan import PLAN
from psg_fx.quantities.base import Extra, Quantity
from psg_fx.quantities.clipped_sum import weights_of_clipped
from psg_fx.quantities.own import extras_of
from psg_fx.torch_private.fakes import with_own_sizes

from ..runner import graph_pass
from .absent import left_out
from .writer import Writer

aten = torch.ops.aten

_GROUP_HINTS = (1009, 1013)
"""G and S while the plan is traced: what no other size should be."""


@graph_pass("lower", before=Stage.PLANNED, after=Stage.LOWERED)
def lower(gm: GraphModule, quantities: Sequence[Quantity], dtype: torch.dtype) -> GraphModule:
    """After: outputs are the losses, new buffer values, and every field of every quantity; nothing else is computed.

    dtype: of further inputs whose quantity leaves it open.
    """
    plan = PLAN.of(gm)
    gradients = {p.gradient.name: p.gradient for p in plan.parameters}
    extras = extras_of(quantities, gradients)
    samples = _batch_node(gm)
    rows = samples if plan.grouping is None else _members_node(gm, samples)
    made = {name: _extra_node(gm, name, extra, dtype, rows) for name, extra in extras.items()}
    fixed = {n: extra.value.to(made[n].meta["val"].device) for n, extra in extras.items() if extra.value is not None}
    facts.update_graph(gm, constants={**facts.graph_facts(gm).constants, **fixed})
    if plan.grouping is not None:
        made |= {MEMBERS.name: rows, COUNT.name: _extra_node(gm, COUNT.name, Extra(()), dtype, rows)}
        if plan.grouping.layout == "scattered" or plan.reads(IDS):
            made[IDS.name] = _extra_node(gm, IDS.name, Extra((None,), torch.int64), dtype, samples)
    made |= {members_of(k).name: _rows_node(gm, k, rows) for k in plan.gathered}
    absent = left_out(quantities, plan)
    facts.update_graph(gm, leaves_out=bool(absent & weights_of_clipped(quantities)))
    writer = Writer(gm, plan, rows, samples, _known_values(gm, made), made, absent)
    _finish(gm, writer.results(quantities))
    if plan.grouping is not None and plan.grouping.layout == "blocks":
        _as_views(gm, rows)
    if facts.graph_facts(gm).runs_code:
        _read_tensors_where_they_lie(gm)
    return gm


def _known_values(gm: GraphModule, extras: Mapping[str, Node]) -> dict[Source, Node]:
    """What leaves and prefixes may read -> nodes of the joint graph."""
    found = {Source(Kind.PLACEHOLDER, n.name): n for n in facts.placeholders(gm)}
    found |= {Source(Kind.GIVEN, name): node for name, node in extras.items()}
    found |= {ids_of(int(spec.name)): n for spec, n in facts.returned(gm) if spec.kind == "ids" and n is not None}
    return found | read_by_networks(gm)


def _batch_node(gm: GraphModule) -> Node:
    return next(n for n in facts.placeholders(gm) if facts.input_spec(n).samples is not None)


def _members_node(gm: GraphModule, samples: Node) -> Node:
    """A placeholder for the numbers of the samples of each group, `[G, S]`."""
    like = samples.meta["val"]
    places = with_own_sizes(like, _GROUP_HINTS[::-1], torch.int64)
    with like.fake_mode:
        value = places.t()
    return _placeholder(gm, MEMBERS.name, value, InputSpec("given", MEMBERS.name))


def _rows_node(gm: GraphModule, axis: int, carrier: Node) -> Node:
    """A placeholder for the rows of each sample or group, of which there are as many as `carrier` has, `[B, S]`."""
    like, name = carrier.meta["val"], members_of(axis).name
    largest = with_own_sizes(like, [_GROUP_HINTS[1] + 6 * (axis + 1)], torch.int64).shape[0]
    with like.fake_mode:
        count = like.shape[facts.input_spec(carrier).samples or 0]
        value = torch.empty((largest, count), dtype=torch.int64, device=like.device).t()
    return _placeholder(gm, name, value, InputSpec("given", name))


def _extra_node(gm: GraphModule, name: str, extra: Extra, dtype: torch.dtype, carrier: Node) -> Node:
    """A placeholder for a further input, with as many rows as `carrier` has."""
    template, dim = carrier.meta["val"], facts.input_spec(carrier).samples
    with template.fake_mode:
        shape = [template.shape[dim or 0] if size is None else size for size in extra.shape]
        value = torch.empty(shape, dtype=extra.dtype or dtype, device=template.device)
    kind: Holds = "given" if extra.value is None else "constant"
    of_samples = dim is not None and None in extra.shape
    return _placeholder(gm, name, value, InputSpec(kind, name, 0 if of_samples else None))


def _placeholder(gm: GraphModule, name: str, value: torch.Tensor, spec: InputSpec) -> Node:
    """A further input, after those there are."""
    with gm.graph.inserting_after(facts.placeholders(gm)[-1]):
        node = gm.graph.placeholder(re.sub(r"\W", "_", name))
    node.target = node.name  # names of two parameters may differ in "." and "_" alone
    node.meta = {"val": value, "psg_fx_input": spec}
    return node


def _read_tensors_where_they_lie(gm: GraphModule) -> None:
    """Tensors that code of the user's has read while a pass ran it are constants, as those that a capture meets are:
    inputs of the graph, which are read where they lie at each call.
    """
    like, known = _batch_node(gm).meta["val"], dict[int, Node]()
    constants = dict(facts.graph_facts(gm).constants)
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, str(node.target))
        if not isinstance(value, torch.Tensor) or isinstance(value, type(like)):
            continue
        if id(value) not in known:
            name = f"read_{len(known)}"
            constants[name] = value.detach()
            fake = like.fake_mode.from_tensor(constants[name], static_shapes=True)
            known[id(value)] = _placeholder(gm, name, fake, InputSpec("constant", name))
            facts.update(known[id(value)])
        node.replace_all_uses_with(known[id(value)])
        gm.graph.erase_node(node)
    facts.update_graph(gm, constants=constants)


def _as_views(gm: GraphModule, members: Node) -> None:
    """Rows that are read in the order in which they lie are a view, as a trace cannot know."""
    sizes: list[Any] = []
    for node in list(members.users):
        if node.target is not aten.index.Tensor or list(_indices(node)) != [members]:
            continue
        with gm.graph.inserting_after(members):
            for dim in (1, 0) if not sizes else ():
                sizes.insert(0, size_of(gm.graph, members, dim))
        node.target, node.args = aten.reshape.default, (node.args[0], [*sizes, *node.meta["val"].shape[2:]])


def _indices(node: Node) -> Any:
    return node.args[1]


def _finish(gm: GraphModule, results: list[tuple[OutputSpec, Node]]) -> None:
    """Keep losses, outputs, buffers and results, which are named for what they hold, as outputs; drop everything that
    only the planner needed.
    """
    for spec, node in results:
        rename(node, spec.title)
    kept = [(spec, node) for spec, node in facts.returned(gm) if spec.kind not in READ and spec.kind != "ids"]
    everything = [*kept, *results]
    gm.graph.output_node().args = (tuple(node for _, node in everything),)
    gm.graph.eliminate_dead_code()
    facts.update_graph(gm, outputs=tuple(spec for spec, _ in everything))
