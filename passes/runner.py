"""Runs passes: copy, verify, call, lint, verify, record, show."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.fx import GraphModule

from psg_fx.graph.history import History, PassRecord, copied
from psg_fx.graph.stages import Stage, verify
from psg_fx.torch_private.graphs import module_without_code

from . import promises  # noqa: F401  (it says what each stage promises)

Transform = Callable[..., GraphModule]


@dataclass(frozen=True)
class GraphPass:
    """A named transformation from one stage to the next."""

    name: str
    before: Stage
    after: Stage
    call: Transform


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for cyclic garbage: passes make many small objects that stay, and every full search walks all of
    torch's.  (Also a decorator.)
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graph_pass(name: str, *, before: Stage, after: Stage) -> Callable[[Transform], GraphPass]:
    """Make a function on graphs a pass."""
    return lambda call: GraphPass(name, before, after, call)


def run(step: GraphPass, gm: GraphModule, history: History, **arguments: object) -> GraphModule:
    """Run one pass on a copy of `gm` and keep the result in `history`."""
    verify(gm, step.before)
    start = time.perf_counter()
    with history.passing(step.name):
        result = step.call(_without_code(gm), **arguments)
        result.graph.lint()
        result.recompile()
    seconds = time.perf_counter() - start
    verify(result, step.after)
    history.graphs[step.after.value] = result
    nodes = len(gm.graph.nodes), len(result.graph.nodes)
    history.record(PassRecord(step.name, step.before, step.after, seconds, *nodes, result))
    return result


def _without_code(gm: GraphModule) -> GraphModule:
    new = module_without_code(gm, copied(gm))
    new.meta = copy.copy(gm.meta)
    return new
