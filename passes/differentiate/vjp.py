"""The vector-Jacobian product of a segment, by autograd: its values, and the cotangents in it and of what it reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from psg_fx.errors import InternalError, NotYetSupported, PsgError, first_line
from psg_fx.graph import facts
from psg_fx.graph.facts import fact
from psg_fx.graph.tracing import trace
from psg_fx.op_table import known
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.source import locate
from psg_fx.torch_private.fakes import empty_as

from .segments import Segment

Tap = tuple[int, int]
"""A site by its place in a segment, and which of its outputs."""


@dataclass(frozen=True)
class Vjp:
    """A segment with its backward pass as a graph of what the segment reads.

    values: of each node of the segment, the nodes of its tensors, or of its size.  seeds: nodes that stand for the
    cotangents of some of these, made after them, so that no size of the forward is written by one of theirs.
    taps: cotangents of what sites make.  reads: cotangents of what is read, by place.
    """

    segment: Segment
    gm: GraphModule
    values: tuple[tuple[Any, ...], ...]
    seeds: tuple[Node, ...]
    taps: dict[Tap, Node]
    reads: dict[int, Node]

    @cached_property
    def forward(self) -> list[Node]:
        """The nodes that the values of the segment are computed by, and what the backward keeps of them: made beside
        them, so that a tuple of results does not live until the backward takes one out of it.
        """
        needed = facts.ancestors(value for values in self.values for value in values if isinstance(value, Node))
        before = itertools.takewhile(lambda node: node not in self.seeds, self._ops)
        needed.update(before)
        return [node for node in self._ops if node in needed]

    @cached_property
    def backward(self) -> list[Node]:
        """The other ones."""
        before = {*self.forward, *self.seeds}
        return [node for node in self._ops if node not in before]

    @cached_property
    def origins(self) -> dict[Node, int]:
        """Of the nodes of the forward, the place of the node of the segment that they are written for."""
        found: dict[Node, int] = {}
        for place, values in enumerate(self.values):
            made = [value for value in values if isinstance(value, Node)]
            for node in facts.ancestors(made, lambda n: n not in found):
                found.setdefault(node, place)
        for node in self.forward:  # what is kept for the backward alone
            found.setdefault(node, max((found[n] for n in node.all_input_nodes if n in found), default=0))
        return {node: found[node] for node in self.forward}

    @property
    def _ops(self) -> list[Node]:
        return [node for node in self.gm.graph.nodes if node.op not in ("placeholder", "output")]


class Tapped(Interpreter):
    """Runs a graph, and makes the outputs of its sites differentiable."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = custom_call(target)
        with_backward = own.under_autograd if own else known(target).under_autograd
        return super().call_function(with_backward or target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        _same_shape(n, result)
        if fact(n).site:
            for output in facts.tensors(result):
                if facts.is_differentiable(output) and not output.requires_grad:
                    output.requires_grad_()
        return result


def vjp(
    segment: Segment, given: Sequence[Any], differentiable: Sequence[bool], ends: Sequence[int], seeds: Sequence[Tensor]
) -> Vjp:
    """given: what is read, fake; differentiable: which of it has a cotangent.  ends: the nodes of which `seeds` are the
    cotangents, by place.
    """
    taps: list[Tap] = []
    reads: list[int] = []

    def joint(*arguments: Any) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor], list[Tensor]]:
        values = list(arguments)
        for i, asked in enumerate(differentiable):
            if asked:
                values[i] = values[i].requires_grad_()
        with torch.enable_grad():
            found = run(segment, values)
            tapped = {
                (place, k): output
                for place, (node, result) in enumerate(zip(segment.nodes, found, strict=True)) if fact(node).site
                for k, output in enumerate(facts.tensors(result))
            }  # fmt: skip
            wanted = {i: value for i, (value, asked) in enumerate(zip(values, differentiable, strict=True)) if asked}
            heads = [found[place] for place in ends]
            after = [empty_as(seed, [head, *facts.tensors(arguments)]) for head, seed in zip(heads, seeds, strict=True)]
            gradients = _gradients(heads, after, [*tapped.values(), *wanted.values()])
        at_taps = {tap: g for tap, g in zip(tapped, gradients, strict=False) if g is not None}
        at_reads = {i: g for i, g in zip(wanted, gradients[len(tapped) :], strict=True) if g is not None}
        taps[:], reads[:] = at_taps, at_reads
        return [_leaves(result) for result in found], after, [*at_taps.values()], [*at_reads.values()]

    gm = trace(joint, given)
    output: Any = gm.graph.output_node()
    (made, after, at_taps, at_reads), output.args = output.args[0], ((*tree_leaves(output.args),),)
    gm.graph.eliminate_dead_code()
    by_tap, by_read = dict(zip(taps, at_taps, strict=True)), dict(zip(reads, at_reads, strict=True))
    return Vjp(segment, gm, tuple(map(tuple, made)), tuple(after), by_tap, by_read)


def run(segment: Segment, given: Sequence[Any]) -> list[Any]:
    """The values of its nodes, where sites make what is differentiable."""
    tapped = Tapped(segment.module)
    try:
        tapped.run(*given)
    except PsgError as error:  # torch.fx writes the graph's own traceback into its text
        raise error.alone() from None
    return [tapped.env[node] for node in segment.copies]


def _leaves(result: Any) -> list[Any]:
    return [result] if isinstance(result, torch.SymInt) else list(facts.tensors(result))


def _same_shape(node: Node, result: Any) -> None:
    """A pass that changed an op's arguments must have kept its facts true."""
    known = node.meta.get("val")
    if not (isinstance(known, torch.Tensor) and isinstance(result, torch.Tensor)):
        return
    if facts.shape(known) != facts.shape(result):
        said = {s for size in facts.shape(known) for s in size.free_symbols}
        if any(size.free_symbols - said for size in facts.shape(result)):
            raise NotYetSupported(
                f"how many values {node.target} gives depends on values", where=locate(node),
                why="these are computed where the graph runs, and the model was captured with one size",
                fix="keep the mask as a buffer of the model, index with numbers (`mask.nonzero()` of before), or write "
                "torch.where",
            )  # fmt: skip
        raise InternalError(
            f"{node.target} has shape {facts.shape(result)}, and the graph says {facts.shape(known)}",
            where=locate(node),
            why="a pass changed the op and not what is known of it",
            fix="please report this with the model",
        )


def _gradients(heads: Sequence[Tensor], seeds: Sequence[Tensor], taps: Sequence[Tensor]) -> list[Tensor | None]:
    """∂(heads·seeds)/∂taps; None where no head depends on a tap."""
    pairs = [(h, s) for h, s in zip(heads, seeds, strict=True) if h.requires_grad]
    floating = [t for t in taps if t.requires_grad]
    if not pairs or not floating:
        return [None] * len(taps)
    try:
        found = torch.autograd.grad([h for h, _ in pairs], floating, [s for _, s in pairs], allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        raise NotYetSupported(
            "an op of the model or loss has a backward that torch does not run here", where="the backward pass",
            why=first_line(error) or type(error).__name__,
            fix="write that op with others: its backward must take a symbol for the batch size",
        ) from error  # fmt: skip
    by_tap = iter(found)
    return [next(by_tap) if t.requires_grad else None for t in taps]
