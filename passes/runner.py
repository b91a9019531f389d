"""Runs passes: copy, verify, call, lint, verify, record, show."""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.fx import GraphModule

from psg_fx.progress import Progress
from psg_fx.stages import Stage, verify
from psg_fx.torch_private import module_without_code

log = logging.getLogger("psg_fx")

Transform = Callable[..., GraphModule]


@dataclass(frozen=True)
class GraphPass:
    """A named transformation from one stage to the next."""

    name: str
    before: Stage
    after: Stage
    call: Transform


@dataclass(frozen=True)
class Step:
    """A record of a pass that ran: its stages, its time in seconds, and the sizes of the graphs before and after."""

    name: str
    before: Stage
    after: Stage
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass
class History:
    """Every stage of one compilation, in order: the graphs and the steps between them; where they show themselves."""

    graphs: dict[str, GraphModule] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @contextmanager
    def passing(self, name: str) -> Iterator[None]:
        """A pass that has begun, and is shown until it ends."""
        with self.progress.doing(f"{name} (pass {len(self.steps) + 1})"):
            yield

    def record(self, step: Step) -> None:
        """A step that is done."""
        self.steps.append(step)
        log.debug("%-14s %6.0f ms  %d -> %d nodes", step.name, 1e3 * step.seconds, step.nodes_before, step.nodes_after)


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
    history.record(Step(step.name, step.before, step.after, seconds, len(gm.graph.nodes), len(result.graph.nodes)))
    return result


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy with its own graph; tensors, fake values and facts (which are frozen) are shared."""
    new = GraphModule(dict(gm.named_children()), _copied(gm), type(gm).__name__)
    new.meta = copy.copy(gm.meta)
    return new


def _without_code(gm: GraphModule) -> GraphModule:
    new = module_without_code(gm, _copied(gm))
    new.meta = copy.copy(gm.meta)
    return new


def _copied(gm: GraphModule):  # type: ignore[no-untyped-def]
    from torch.fx import Graph

    graph = Graph()
    mapping: dict[object, object] = {}
    output = graph.graph_copy(gm.graph, mapping)  # type: ignore[arg-type]
    graph.output(output)
    for old, new in mapping.items():
        new.meta = copy.copy(old.meta)  # type: ignore[attr-defined]
    return graph
