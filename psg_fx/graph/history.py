"""The graphs and the steps of one compilation, as they are kept and shown."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

from psg_fx.graph.stages import Stage
from psg_fx.progress import Progress

log = logging.getLogger("psg_fx")


@dataclass(frozen=True)
class PassRecord:
    """A record of a pass that ran: its stages, its time in seconds, the sizes of the graphs before and after, and what
    it made of the graph.
    """

    name: str
    before: Stage
    after: Stage
    seconds: float
    nodes_before: int
    nodes_after: int
    result: GraphModule | None = None


@dataclass
class History:
    """Every stage of one compilation, in order: the graphs and the passes between them; where they show themselves."""

    graphs: dict[str, GraphModule] = field(default_factory=dict)
    passes: list[PassRecord] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @contextmanager
    def passing(self, name: str) -> Iterator[None]:
        """A pass that has begun, and is shown until it ends."""
        with self.progress.doing(f"{name} (pass {len(self.passes) + 1})"):
            yield

    def record(self, done: PassRecord) -> None:
        """A pass that is done."""
        self.passes.append(done)
        log.debug("%-14s %6.0f ms  %d -> %d nodes", done.name, 1e3 * done.seconds, done.nodes_before, done.nodes_after)


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy with its own graph; tensors, fake values and facts (which are frozen) are shared."""
    new = GraphModule(dict(gm.named_children()), copied(gm), type(gm).__name__)
    new.meta = copy.copy(gm.meta)
    return new


def copied(gm: GraphModule) -> Graph:
    """A copy of the graph, its nodes' metadata copied one level deep."""
    graph = Graph()
    mapping: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, mapping))
    for old, new in mapping.items():
        new.meta = copy.copy(old.meta)
    return graph
