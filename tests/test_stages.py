"""A graph that breaks a promise of its stage is refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

import psg_fx
from psg_fx import InternalError, facts
from psg_fx.passes.runner import History, copy_graph, graph_pass, run
from psg_fx.stages import Stage, broken, checks, verify

aten = torch.ops.aten


@cache
def graphs() -> dict[str, GraphModule]:
    """A sound graph of every stage."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    step = psg_fx.transform(model, lambda out: out.square().sum(), backend="eager")
    step(torch.randn(3, 4))
    return step.graphs


def graph(stage: Stage) -> GraphModule:
    return copy_graph(graphs()[stage.value])


def last_op(gm: GraphModule) -> Node:
    return [n for n in gm.graph.nodes if n.op == "call_function"][-1]


def carrier(gm: GraphModule) -> Node:
    return next(n for n in facts.placeholders(gm) if facts.input_spec(n).samples is not None)


def forget_an_input(gm: GraphModule) -> None:
    del facts.placeholders(gm)[0].meta["psg_fx_input"]


def forget_an_output(gm: GraphModule) -> None:
    info = facts.graph_facts(gm)
    gm.meta[facts.KEY] = dataclasses.replace(info, outputs=info.outputs[:-1])


def write_in_place(gm: GraphModule) -> None:
    node = last_op(gm)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(aten.relu_.default, (node,)).meta = dict(node.meta)


def forget_a_fact(gm: GraphModule) -> None:
    del last_op(gm).meta[facts.KEY]


def sum_the_loss(gm: GraphModule) -> None:
    loss = facts.outputs(gm)[0]
    assert loss is not None
    facts.update(loss, samples=None)


def keep_a_cotangent(gm: GraphModule) -> None:
    info = facts.graph_facts(gm)
    outputs = (*info.outputs[:-1], facts.OutputSpec("cotangent", "linear.0"))
    gm.meta[facts.KEY] = dataclasses.replace(info, outputs=outputs)


def fix_the_batch(gm: GraphModule) -> None:
    node = carrier(gm)
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(7, *value.shape[1:])


BREAKS: dict[str, tuple[Stage, Callable[[GraphModule], None], str]] = {
    "described-inputs": (Stage.CAPTURED, forget_an_input, "every placeholder has an InputSpec"),
    "described-outputs": (Stage.JOINT, forget_an_output, "every output has an OutputSpec"),
    "functional": (Stage.BATCHED, write_in_place, "no op writes into a tensor"),
    "batched": (Stage.BATCHED, forget_a_fact, "every op has a fact about its samples"),
    "unreduced": (Stage.UNREDUCED, sum_the_loss, "the loss carries the samples in dim 0"),
    "lowered": (Stage.LOWERED, keep_a_cotangent, "a lowered graph returns results only"),
    "any_batch": (Stage.MERGED, fix_the_batch, "the batch size stays a symbol"),
}


@pytest.mark.parametrize("stage", Stage, ids=lambda s: s.value)
def test_sound_graph_passes(stage: Stage) -> None:
    verify(graph(stage), stage)


@pytest.mark.parametrize("name", BREAKS)
def test_broken_graph_is_refused(name: str) -> None:
    stage, damage, promise = BREAKS[name]
    gm = graph(stage)
    damage(gm)
    with pytest.raises(InternalError, match=f"a pass broke the promise: {promise}"):
        verify(gm, stage)


def test_every_check_is_broken_here() -> None:
    names = {check.__name__ for stage in Stage for check in checks(stage)}
    assert names <= {name.partition("-")[0] for name in BREAKS}


def test_runner_refuses_what_a_pass_breaks() -> None:
    careless = graph_pass("careless", before=Stage.CAPTURED, after=Stage.BATCHED)(lambda gm: gm)
    with pytest.raises(InternalError, match="every op has a fact about its samples"):
        run(careless, graph(Stage.CAPTURED), History())


def test_runner_leaves_its_input_alone() -> None:
    def meddle(gm: GraphModule) -> GraphModule:
        forget_a_fact(gm)
        return gm

    before = graph(Stage.BATCHED)
    kept = copy.copy(last_op(before).meta)
    with pytest.raises(InternalError):
        run(graph_pass("meddle", before=Stage.BATCHED, after=Stage.BATCHED)(meddle), before, History())
    assert last_op(before).meta == kept


def test_error_names_the_node() -> None:
    gm = graph(Stage.CAPTURED)
    error = broken("nothing", gm, last_op(gm))
    assert str(error).startswith("a pass broke the promise: nothing\n  where  %")
