"""Segments and their backward passes as one graph: forward in order, then backward in reverse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import call
from psg_fx.torch_private.tracer import tracing_symbols

from .segments import Segment, segments
from .vjp import Vjp, run, vjp
from .written import Written

T = TypeVar("T")
R = TypeVar("R")
Step = Callable[[int, list[Node], list[T]], Mapping[Node, T]]
"""Of a segment, the cotangents of what it reads by those of some of its nodes."""


class Chain:
    """The segments of a graph; those of one kind are differentiated once.

    wanted: inputs that have cotangents, too.
    """

    def __init__(self, gm: GraphModule, wanted: Sequence[Node]) -> None:
        self._gm = gm
        self._sizes, self._segments = segments(gm)
        self._known: dict[Any, Any] = {}
        self._wanted, self._differentiable = wanted, set(wanted)
        for segment in self._segments[:-1]:
            self._differentiable.update(n for n, asks in zip(segment.nodes, self._asking(segment), strict=True) if asks)

    def joint(self, ends: Sequence[Node], seeds: Sequence[Tensor], tangents: Sequence[str]) -> Written:
        """ends: of which `seeds` are the cotangents (fake).  tangents: of which outputs these are inputs of the graph;
        of none, they are ones.
        """
        vjps: dict[int, Vjp] = {}

        def differentiate(i: int, ends: list[Node], seeds: list[Tensor]) -> Mapping[Node, Tensor]:
            vjps[i] = self._vjp(self._segments[i], ends, seeds)
            return {self._segments[i].reads[k]: node.meta["val"] for k, node in vjps[i].reads.items()}

        def write(i: int, ends: list[Node], seeds: list[Node]) -> Mapping[Node, Node]:
            return written.backward(self._segments[i], vjps[i], seeds)

        self._backward(zip(ends, seeds, strict=True), differentiate, _sum)
        written = Written(self._gm, tangents, seeds)
        written.sizes(self._sizes)
        for i, segment in enumerate(self._segments):
            written.forward(segment, vjps[i])
        made = written.tangents or [call(written.gm, torch.ops.aten.ones_like.default, written.made[n]) for n in ends]
        found = self._backward(zip(ends, made, strict=True), write, written.add)
        written.cotangents.update({(n, 0): found[n] for n in self._wanted if n in found})
        return written

    def _backward(self, ends: Iterable[tuple[Node, T]], step: Step[T], add: Callable[[T, T], T]) -> dict[Node, T]:
        """The cotangents of all that segments hand to each other: what comes from several readers is added."""
        found: dict[Node, T] = {}

        def receive(node: Node, cotangent: T) -> None:
            found[node] = add(found[node], cotangent) if node in found else cotangent

        for node, seed in ends:
            receive(node, seed)
        for i in reversed(range(len(self._segments))):
            own = [node for node in self._segments[i].nodes if node in found]
            for node, cotangent in step(i, own, [found[n] for n in own]).items():
                receive(node, cotangent)
        return found

    def _asking(self, segment: Segment) -> tuple[bool, ...]:
        """Of each node, whether autograd would take a cotangent there."""

        def asking() -> tuple[bool, ...]:
            given = _given(segment)
            for value, asks in zip(given, self._flags(segment), strict=True):
                if asks:
                    value.requires_grad_()
            with tracing_symbols(given), torch.enable_grad():
                return tuple(getattr(value, "requires_grad", False) for value in run(segment, given))

        return self._once(segment, (self._flags(segment),), asking)

    def _vjp(self, segment: Segment, ends: Sequence[Node], seeds: Sequence[Tensor]) -> Vjp:
        flags, places = self._flags(segment), tuple(map(segment.nodes.index, ends))
        begin = (str(v.storage_offset()) for n in segment.reads if isinstance(v := n.meta["val"], Tensor))
        about = (flags, places, *map(_layout, seeds), *begin)
        return self._once(segment, about, lambda: vjp(segment, _given(segment), flags, places, seeds))

    def _flags(self, segment: Segment) -> tuple[bool, ...]:
        return tuple(n in self._differentiable for n in segment.reads)

    def _once(self, segment: Segment, about: tuple[Any, ...], compute: Callable[[], R]) -> R:
        """What is found of one segment holds for all of its kind of which the same is asked."""
        if segment.kind is None:
            return compute()
        key = segment.kind, about
        if key not in self._known:
            self._known[key] = compute()
        found: R = self._known[key]
        return found


def _sum(one: Tensor, other: Tensor) -> Tensor:
    with tracing_symbols([one]):
        return one + other


def _given(segment: Segment) -> list[Any]:
    """What it reads, as fake tensors without gradients, and sizes."""
    values = [n.meta["val"] for n in segment.reads]
    return [value.detach() if isinstance(value, Tensor) else value for value in values]


def _layout(value: Tensor) -> Any:
    """What a trace can depend on."""
    places = map(str, (*value.shape, *value.stride(), value.storage_offset()))
    return (*places, value.dtype, value.device, value.is_conj(), value.is_neg())
