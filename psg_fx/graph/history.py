"""The graphs and the steps of one compilation, as they are kept and shown."""

from __future__ import annotations

import copy
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node, map_arg

from psg_fx.graph.stages import Stage
from psg_fx.progress import Progress
from psg_fx.torch_private.graphs import module_without_code

log = logging.getLogger("psg_fx")


class _Said(NamedTuple):
    """What a node said: its op and what it is of, its name, and its metadata."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    type: Any
    meta: Mapping[str, Any]

    def is_still_said(self, node: Node) -> bool:
        """Whether the node says the same objects: its arguments are others once one of them has changed."""
        return (
            self.args is node.args and self.kwargs is node.kwargs and self.target is node.target
            and self.name == node.name and self.type is node.type and len(self.meta) == len(node.meta)
            and all(value is node.meta.get(key, self) for key, value in self.meta.items())
        )  # fmt: skip


class Snapshot:
    """What a graph was: what its nodes said, which is not changed in place.  The graph is made when it is asked for.

    before: an earlier one, with which it shares what nodes have said since.
    """

    def __init__(self, gm: GraphModule, before: Snapshot | None = None) -> None:
        known: dict[Node, _Said] = {} if before is None else before.said
        self.said: dict[Node, _Said] = {node: _said(node, known.get(node)) for node in gm.graph.nodes}
        self._root = dict(gm.named_children())
        self._root |= {str(n.target): _attribute(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"}
        self._meta, self._type = copy.copy(gm.meta), type(gm).__name__
        self._module: GraphModule | None = None

    @property
    def module(self) -> GraphModule:
        """The graph as it was: always the same object."""
        if self._module is None:
            self._module = self.restored()
            self.said.clear()
        return self._module

    def restored(self) -> GraphModule:
        """A graph module of its own."""
        if self._module is not None:
            return copy_graph(self._module)
        graph, now = Graph(), dict[Node, Node]()
        for node, said in self.said.items():
            args, kwargs = map_arg(said.args, now.__getitem__), map_arg(said.kwargs, now.__getitem__)
            now[node] = graph.create_node(said.op, said.target, args, kwargs, said.name, said.type)
            now[node].meta = dict(said.meta)
        module = module_without_code(self._root, graph, self._type)
        module.meta = self._meta
        return module


def _said(node: Node, before: _Said | None) -> _Said:
    if before is not None and before.is_still_said(node):
        return before
    return _Said(node.op, node.target, node.args, node.kwargs, node.name, node.type, dict(node.meta))


def _attribute(gm: GraphModule, path: str) -> Any:
    return operator.attrgetter(path)(gm)


class Graphs(Mapping[str, GraphModule]):
    """Graphs by name, from snapshots."""

    def __init__(self) -> None:
        self._kept: dict[str, Snapshot] = {}

    def keep(self, name: str, gm: GraphModule) -> Snapshot:
        """As it is now."""
        self._kept[name] = Snapshot(gm, next(reversed(self._kept.values()), None))
        return self._kept[name]

    def kept(self, name: str) -> Snapshot:
        """As it was."""
        return self._kept[name]

    def put_before(self, earlier: Graphs) -> None:
        """Others, which were made before these."""
        self._kept = earlier._kept | self._kept

    def __getitem__(self, name: str) -> GraphModule:
        return self._kept[name].module

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


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
    result: Snapshot | None = None


_RUNNING = threading.RLock()
"""Held while passes that were left out are run."""


@dataclass
class History:
    """Every stage of one compilation, in order: the graphs and the passes between them; where they show themselves."""

    graphs: Graphs = field(default_factory=Graphs)
    passes: list[PassRecord] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    verified: tuple[GraphModule, Stage] | None = None
    """The graph that the last pass left, and the stage whose promises it was held to."""
    left_out: Callable[[History], object] | None = None
    """Runs passes whose result was at hand, and which were left out."""

    def whole(self) -> History:
        """The same with the passes that were left out, which are run now."""
        with _RUNNING:  # a second thread that asks waits
            if self.left_out is not None:
                later = History(progress=self.progress)
                self.left_out(later)
                self.graphs.put_before(later.graphs)
                self.passes[1:1] = later.passes  # the first one is capture
                self.left_out = None
        return self

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
    return Snapshot(gm).restored()
