"""The stages of a graph, and what each promises.  The runner checks a graph at every stage border."""

from __future__ import annotations

import enum
from collections.abc import Callable

from torch.fx import GraphModule, Node

from psg_fx.errors import InternalError
from psg_fx.source import locate


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


Promise = Callable[[GraphModule], None]
_CHECKS: dict[Stage, list[Promise]] = {stage: [] for stage in Stage}


def promise(*stages: Stage) -> Callable[[Promise], Promise]:
    """Register a check: graphs at these stages must pass it."""

    def register(check: Promise) -> Promise:
        for stage in stages:
            _CHECKS[stage].append(check)
        return check

    return register


def checks(stage: Stage) -> tuple[Promise, ...]:
    """What a graph at `stage` must satisfy."""
    return tuple(_CHECKS[stage])


def verify(gm: GraphModule, stage: Stage) -> None:
    """Raise `InternalError` unless `gm` keeps every promise of `stage`."""
    for check in checks(stage):
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
