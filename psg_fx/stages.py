"""The stages of a graph, and what each promises.  The runner checks a graph at every stage border."""

from __future__ import annotations

import enum
from collections.abc import Callable

from torch.fx import GraphModule, Node

from psg_fx import facts
from psg_fx.errors import InternalError, locate
from psg_fx.tracing import mutates


class Stage(enum.Enum):
    """What has been done to a graph.  Stages come in this order."""

    CAPTURED = "captured"
    BATCHED = "batched"
    UNREDUCED = "unreduced"
    SITED = "sited"
    JOINT = "joint"
    NETWORKED = "networked"
    MERGED = "merged"
    PLANNED = "planned"
    LOWERED = "lowered"
    TIDIED = "tidied"


Check = Callable[[GraphModule], None]
_CHECKS: dict[Stage, list[Check]] = {stage: [] for stage in Stage}


def promise(*stages: Stage) -> Callable[[Check], Check]:
    """Register a check: graphs at these stages must pass it."""

    def register(check: Check) -> Check:
        for stage in stages:
            _CHECKS[stage].append(check)
        return check

    return register


def checks(stage: Stage) -> tuple[Check, ...]:
    """What a graph at `stage` must satisfy."""
    return tuple(_CHECKS[stage])


def verify(gm: GraphModule, stage: Stage) -> None:
    """Raise `InternalError` unless `gm` keeps every promise of `stage`."""
    for check in _CHECKS[stage]:
        check(gm)


def broken(promise_text: str, gm: GraphModule, node: Node | None = None) -> InternalError:
    """The error for a broken promise."""
    where = locate(node) if node is not None else f"the graph with {len(gm.graph.nodes)} nodes"
    return InternalError(
        f"a pass broke the promise: {promise_text}",
        where=where,
        why="a pass left a graph that its stage does not allow",
        fix="please report this with the model; backend='eager' does not help",
    )


@promise(*Stage)
def described(gm: GraphModule) -> None:
    """Every placeholder and every output says what it holds."""
    for node in facts.placeholders(gm):
        if "psg_fx_input" not in node.meta:
            raise broken("every placeholder has an InputSpec", gm, node)
    if len(facts.outputs(gm)) != len(facts.graph_facts(gm).outputs):
        raise broken("every output has an OutputSpec", gm)


@promise(*Stage)
def functional(gm: GraphModule) -> None:
    """No op writes into a tensor."""
    for node in gm.graph.nodes:
        if mutates(node):
            raise broken("no op writes into a tensor", gm, node)


@promise(Stage.BATCHED, Stage.UNREDUCED, Stage.SITED)
def batched(gm: GraphModule) -> None:
    """Every op has a fact about its samples, with a proof."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and facts.KEY not in node.meta:
            raise broken("every op has a fact about its samples", gm, node)


@promise(Stage.UNREDUCED, Stage.SITED)
def unreduced(gm: GraphModule) -> None:
    """The loss is one number per sample."""
    for spec, node in zip(facts.graph_facts(gm).outputs, facts.outputs(gm), strict=True):
        if spec.kind == "loss" and (node is None or facts.fact(node).samples != facts.SampleAxis(0)):
            raise broken("the loss carries the samples in dim 0", gm, node)


@promise(*Stage)
def any_batch(gm: GraphModule) -> None:
    """The batch size is a symbol: nothing has fixed it to the size it was traced with."""
    batch = facts.graph_facts(gm).batch
    for node in facts.placeholders(gm):
        dim = facts.input_spec(node).samples
        if dim is not None and facts.expr(node.meta["val"].shape[dim]) != batch:
            raise broken("the batch size stays a symbol", gm, node)


@promise(Stage.LOWERED, Stage.TIDIED)
def lowered(gm: GraphModule) -> None:
    """Only results remain as outputs: no site input and no cotangent."""
    for spec in facts.graph_facts(gm).outputs:
        if spec.kind in ("activation", "cotangent"):
            raise broken("a lowered graph returns results only", gm)
