"""A simple count of what a graph of forward and backward asks of a device: flops, bytes and launches.

The graph is decomposed as inductor does it first.  An op that torch has a kernel for (a product, a convolution,
attention) is a launch of its own: it reads its arguments and writes its result.  So is a sum over leading axes (a bias,
a mean over the batch): two launches, as inductor splits it, with whatever is computed for it alone.  Of all other ops
those that hang together are one launch, as far as nothing of the first kinds lies between them: ops at equal *depth*,
the largest number of such kernels on a way to them.  It reads, once each, the values from outside and writes those that
are read outside.  Views are free.

    depth(n) = max over arguments p of depth(p) + [p has a kernel of its own]

Of attention with a causal mask half of the products count.  A loop of psg_fx's own is as many launches as it calls ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from no_device import pretend
from no_device.loops import inside, is_loop
from psg_fx.graph import facts
from psg_fx.graph.lifetimes import bytes_of, is_view
from psg_fx.planner.cost import Work
from psg_fx.torch_private.tracer import trace_fakes

aten = torch.ops.aten
KINDS = {
    aten.mm: "gemm", aten.addmm: "gemm", aten.bmm: "bmm", aten.baddbmm: "bmm",
    aten.convolution: "conv", aten.convolution_backward: "conv",
    aten._scaled_dot_product_flash_attention_for_cpu: "bmm",
    aten._scaled_dot_product_flash_attention_for_cpu_backward: "bmm",
}  # fmt: skip
"""Ops with a kernel of their own, and the rate that each runs at."""


REDUCTIONS = {aten.sum, aten.mean}


def decomposed(gm: GraphModule) -> GraphModule:
    """The graph in ops that inductor takes, for fake inputs of the same sizes."""
    given = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return trace_fakes(lambda *args: gm(*args), given, decomposition_table=pretend.decompositions())


def counted(gm: GraphModule, batch: sympy.Symbol | None = None, size: int = 0) -> list[tuple[Work, torch.dtype]]:
    """The launches of a graph; `batch` is a symbol of `size` samples."""
    gm = decomposed(gm)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    return _Count(gm, output.all_input_nodes, batch or sympy.Symbol("none"), size).launches()


class _Count:
    def __init__(self, gm: GraphModule, kept: Sequence[Node], batch: sympy.Symbol, size: int) -> None:
        self.batch, self.size = batch, size
        needed = facts.ancestors(kept) | set(kept)
        self.order = [n for n in gm.graph.nodes if n in needed]
        self.owner: dict[Node, Node] = {}
        for node in self.order:
            of = node.all_input_nodes[0] if is_view(node) else node
            shows = is_view(node) and not (_is_part(node) and self.owner[of] is of)
            self.owner[node] = self.owner[of] if shows else node
        self.kept = {self.owner[n] for n in kept}
        self.alone = self._alone()
        self.group = self._groups([n for n in self.order if self._works(n)])

    def launches(self) -> list[tuple[Work, torch.dtype]]:
        members: dict[Node, list[Node]] = defaultdict(list)
        for node, group in self.group.items():
            members[group].append(node)
        found = []
        for first, nodes in members.items():
            found += self._loop(first) if is_loop(first.target) else [self._launch(nodes)]
        return found

    def _loop(self, node: Node) -> list[tuple[Work, torch.dtype]]:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._concrete(n.meta["val"]))
        return inside(node.target, args, kwargs)

    def _works(self, node: Node) -> bool:
        """Whether it computes: no input, size, view or part of a result."""
        has_tensor = any(True for _ in facts.tensors(node.meta.get("val")))
        return node.op == "call_function" and has_tensor and self.owner[node] is node and not _is_part(node)

    def _groups(self, working: Sequence[Node]) -> dict[Node, Node]:
        """Node -> the first of those that are launched with it."""
        depth: dict[Node, int] = {}
        group: dict[Node, Node] = {}

        def found(node: Node) -> Node:
            while group[node] is not node:
                node = group[node]
            return node

        for node in working:
            makers = [m for m in map(self._maker, node.all_input_nodes) if m in depth]
            depth[node] = max((depth[m] + self._is_own(m) for m in makers), default=0)
            group[node] = node
            for maker in makers:
                together = self.alone.get(maker) is self.alone.get(node)
                if together and not (self._is_own(node) or self._is_own(maker)) and depth[maker] == depth[node]:
                    group[found(maker)] = found(node)
            for maker in makers:
                if self._is_leading_sum(node) and self.alone.get(maker) is node:
                    group[found(maker)] = node
        return {node: found(node) for node in working}

    def _is_own(self, node: Node) -> bool:
        """Whether it has a kernel of its own."""
        return _kind(node) is not None or self._is_leading_sum(node)

    def _is_leading_sum(self, node: Node) -> bool:
        if getattr(node.target, "overloadpacket", None) not in REDUCTIONS:
            return False
        dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list) else [0]
        value = node.all_input_nodes[0].meta["val"]
        return 0 in [d % max(value.dim(), 1) for d in dims] and value.dim() > 0

    def _alone(self) -> dict[Node, Node]:
        """What is computed for one sum over leading axes alone: op -> that sum."""
        found = {n: n for n in self.order if self._is_leading_sum(n)}
        for node in reversed(self.order):
            if self._works(node) and not self._is_own(node) and node not in self.kept:
                readers = {found.get(user) for user in self._readers(node)}
                if len(readers) == 1 and (reader := readers.pop()) is not None:
                    found[node] = reader
        return found

    def _readers(self, node: Node) -> set[Node]:
        """The ops that read a value or a view of it."""
        found, shown = set(), [node]
        for value in shown:
            for user in value.users:
                if user in self.owner:
                    (found.add if self.owner[user] is user and not _is_part(user) else shown.append)(user)
        return found

    def _maker(self, node: Node) -> Node:
        """The op that computed a value."""
        owner = self.owner[node]
        return owner.all_input_nodes[0] if _is_part(owner) else owner

    def _launch(self, nodes: Sequence[Node]) -> tuple[Work, torch.dtype]:
        inside = set(nodes)
        read: dict[Node, int] = defaultdict(int)
        for argument in dict.fromkeys(a for n in nodes for a in n.all_input_nodes):
            if self._maker(argument) not in inside:
                owner = self.owner[argument]
                read[owner] = min(read[owner] + self._bytes(argument), self._bytes(owner))
        written = sum(self._bytes(v) for n in nodes for v in _values(n) if self._is_read_outside(v, inside))
        own = next((n for n in nodes if self._is_own(n)), nodes[0])
        kind, dtype = _kind(own) or "pointwise", next(facts.tensors(own.meta["val"])).dtype
        flops = sum(map(self._elements, nodes)) if kind == "pointwise" else self._flops(own)
        return Work(flops, sum(read.values()), written, kind, 1 + self._is_leading_sum(own)), dtype

    def _is_read_outside(self, value: Node, inside: set[Node]) -> bool:
        return value in self.kept or not self._readers(value) <= inside

    def _bytes(self, node: Node) -> int:
        return bytes_of(node, self.batch, self.size)

    def _elements(self, node: Node) -> int:
        """Of the largest tensor that an op reads or writes: one operation for each."""
        tensors = [t for n in (node, *node.all_input_nodes) for t in facts.tensors(n.meta.get("val"))]
        return max(t.numel() for t in map(self._concrete, tensors))

    def _concrete(self, value: Any) -> Any:
        """A tensor without content whose sizes are numbers; a number of a symbol."""
        if isinstance(value, torch.Tensor):
            shape = [facts.at(s, self.batch, self.size) for s in facts.shape(value)]
            return torch.empty(shape, dtype=value.dtype, device="meta")
        return facts.at(facts.expr(value), self.batch, self.size) if isinstance(value, torch.SymInt) else value

    def _flops(self, node: Node) -> int:
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._concrete(n.meta["val"]))
        if packet is aten._scaled_dot_product_flash_attention_for_cpu:
            is_causal = bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal"))
            return int(sdpa_flop_count(*(t.shape for t in args[:3])) // (1 + is_causal))
        if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            return int(sdpa_backward_flop_count(*(t.shape for t in args[:4])) // (1 + bool(args[7])))
        out = node.meta["val"]
        found = self._concrete(out) if isinstance(out, torch.Tensor) else [self._concrete(t) for t in out]
        return int(flop_registry[packet](*args, **kwargs, out_val=found))


def _kind(node: Node) -> str | None:
    """The rate of an op that has kernels of its own."""
    return "loop" if is_loop(node.target) else KINDS.get(getattr(node.target, "overloadpacket", None))


def _is_part(node: Node) -> bool:
    """Whether it takes one of several results."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _values(node: Node) -> list[Node]:
    """The results of an op."""
    parts = [user for user in node.users if _is_part(user)]
    return parts or [node]
