"""Runs passes: verify, call, lint, verify, record, show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from psg_fx.graph.history import History, PassRecord
from psg_fx.graph.stages import Stage, verify
from psg_fx.torch_private.tracer import traced_quickly

from . import promises  # noqa: F401  (it says what each stage promises)

Transform = Callable[..., GraphModule]


@dataclass(frozen=True)
class GraphPass:
    """A named transformation from one stage to the next."""

    name: str
    before: Stage
    after: Stage
    call: Transform


def graph_pass(name: str, *, before: Stage, after: Stage) -> Callable[[Transform], GraphPass]:
    """Make a function on graphs a pass."""
    return lambda call: GraphPass(name, before, after, call)


def run(step: GraphPass, gm: GraphModule, history: History, **arguments: object) -> GraphModule:
    """Run one pass, which may change `gm`, and keep what it makes of it in `history`."""
    if history.verified != (gm, step.before):
        verify(gm, step.before)
    start, before = time.perf_counter(), len(gm.graph.nodes)
    with history.passing(step.name), traced_quickly():
        result = step.call(gm, **arguments)
        result.graph.lint()
        result.recompile()
    seconds = time.perf_counter() - start
    verify(result, step.after)
    history.verified = (result, step.after)
    kept = history.graphs.keep(step.after.value, result)
    history.record(PassRecord(step.name, step.before, step.after, seconds, before, len(result.graph.nodes), kept))
    return result
