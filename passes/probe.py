"""An op without a rule is tried out: on random values, does row i of the output come from row i of the inputs alone?

With B = 3: the op on the whole batch, restricted to sample i, must equal the op on sample i alone, for every i and for
several draws; a changed sample j then leaves row i as it is, since row i is the op on sample i alone.  Some draws are
there for ops that mix for certain values only: a wide spread, many equal values, one sample far from the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from psg_fx import facts
from psg_fx.axes import Misfit, single
from psg_fx.errors import NotYetSupported, locate
from psg_fx.facts import Axes, SampleAxis
from psg_fx.passes.independence.values import FIX, Result, mixed, no_place, op_name, tensors

SIZE, LARGEST = 3, 2**22
DRAWS, FURTHER = ("normal", "normal, again"), ("spread", "equal", "far")


def probe(node: Node, batch: sympy.Symbol, known: Mapping[Node, Axes], notes: list[str]) -> Result:
    """The sample axes of the outputs of an op without a rule, or a refusal."""
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded in target.tags
        or target._schema.is_mutable
    ):
        raise _unsupported(node, "it has no rule, and it cannot be tried out (random, in place, or not an operator)")
    for axes in known.values():
        if isinstance(axes, tuple):
            raise _unsupported(node, "it has no rule, and an input is a tuple")
    outs = [single(facts.shape(t), batch) for t in tensors(node.meta["val"])] if _fits(node, batch) else []
    trial = Trial(node, batch, known)
    possible = [list(candidates(o.dim, o.factor)) for o in outs]
    if not any(o.dim is not None for o in outs):
        raise mixed(node, "no dim of its output holds the samples of its inputs", FIX)
    try:
        for whole, alone in trial.draws():
            for place, options in enumerate(possible):
                rows = [a[place] for a in alone]
                possible[place] = [axis for axis in options if _agree(whole[place], rows, axis)]
    except Exception as error:
        if isinstance(error, NotYetSupported):
            raise
        raise _unsupported(
            node, f"it has no rule, and trying it out failed: {type(error).__name__}: {error}"
        ) from error
    if not all(possible):
        raise mixed(node, "tried out on random values, a sample's rows change with the other samples", FIX)
    notes.append(f"{op_name(node)} (%{node.name}) has no rule; its samples were found apart by trying it out")
    chosen = tuple(c[0] for c in possible)
    return Result(chosen[0] if isinstance(node.meta["val"], torch.Tensor) else chosen)


def _fits(node: Node, batch: sympy.Symbol) -> bool:
    try:
        for tensor in tensors(node.meta["val"]):
            single(facts.shape(tensor), batch)
    except Misfit as misfit:
        raise no_place(node, misfit) from None
    return True


def candidates(dim: int | None, factor: int) -> Iterator[SampleAxis | None]:
    """The layouts that a dim of size factor * B may have."""
    if dim is None:
        yield None
        return
    for inner in range(1, factor + 1):
        if factor % inner == 0:
            yield SampleAxis(dim, factor // inner, inner)


def take(value: torch.Tensor, axis: SampleAxis | None, i: int) -> torch.Tensor:
    """The rows of sample i: `[.., outer, B, inner, ..]` at B-index i, as in a batch of one."""
    if axis is None:
        return value
    unfolded: torch.Tensor = value.unflatten(axis.dim, (axis.outer, -1, axis.inner))
    row: torch.Tensor = unfolded.select(axis.dim + 1, i).flatten(axis.dim, axis.dim + 1)
    return row


def _agree(whole: torch.Tensor, alone: list[torch.Tensor], axis: SampleAxis | None) -> bool:
    return all(close(take(whole, axis, i), expected) for i, expected in enumerate(alone))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to rounding, relative to the entry and to the usual size of the entries."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not facts.is_differentiable(found):
        return torch.equal(found, expected)
    finite = expected.abs()[torch.isfinite(expected)].double()
    usual = max(float(finite.median()), 1e-2) if finite.numel() else 1.0
    return torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * usual, equal_nan=True)


def _unsupported(node: Node, why: str) -> NotYetSupported:
    return NotYetSupported(
        f"{op_name(node)} cannot be shown to keep samples apart",
        where=locate(node),
        why=why,
        fix="rewrite this line with other ops, or ask for a rule for this op",
    )


class Trial:
    """One op with random arguments, for the whole batch and for each sample."""

    def __init__(self, node: Node, batch: sympy.Symbol, known: Mapping[Node, Axes]) -> None:
        self.node, self.batch, self.known = node, batch, known

    def draws(self) -> Iterator[tuple[list[torch.Tensor], list[list[torch.Tensor]]]]:
        """The outputs for each kind of values; the op must run on the ordinary ones."""
        for kind in DRAWS:
            yield self.run(kind)
        for kind in FURTHER:
            try:
                found = self.run(kind)
            except Exception:  # such values are not in its domain: a singular matrix, say
                continue
            yield found

    def run(self, kind: str) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """The outputs on the batch, and on each sample alone."""
        generator = torch.Generator().manual_seed((DRAWS + FURTHER).index(kind))
        drawn: dict[Node, Any] = {n: self.draw(n, generator, kind) for n in self.node.all_input_nodes}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            whole = self.call({n: self.number(n, SIZE) if v is None else v for n, v in drawn.items()})
            alone = [self.call({n: self.pick(n, v, i) for n, v in drawn.items()}) for i in range(SIZE)]
        return whole, alone

    def call(self, values: Mapping[Node, Any]) -> list[torch.Tensor]:
        """The op on concrete values."""
        args = torch.fx.map_arg(self.node.args, lambda n: values[n])
        kwargs = torch.fx.map_arg(self.node.kwargs, lambda n: values[n])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        assert callable(self.node.target)
        return tensors(self.node.target(*args, **kwargs))

    def pick(self, node: Node, value: Any, i: int) -> Any:
        """An argument for sample i alone."""
        if value is None:
            return self.number(node, 1)
        axis = self.known.get(node)
        return take(value, axis, i) if isinstance(axis, SampleAxis) else value

    def number(self, node: Node, size: int) -> Any:
        """A size argument at one batch size."""
        value = node.meta["val"]
        return facts.at(facts.expr(value), self.batch, size)

    def draw(self, node: Node, generator: torch.Generator, kind: str) -> Any:
        """A random tensor of the node's shape at B = 3; None for numbers."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        shape = [facts.at(s, self.batch, SIZE) for s in facts.shape(value)]
        if torch.Size(shape).numel() > LARGEST:
            raise _unsupported(self.node, f"it has no rule, and %{node.name} is too large to try it out")
        if value.is_complex():
            return torch.randn(shape, generator=generator, dtype=torch.complex128).to(value.dtype)
        if value.is_floating_point():
            drawn = _shaped(torch.randn(shape, generator=generator, dtype=torch.float64), kind, self.known.get(node))
            return drawn.to(value.dtype if value.dtype == torch.float64 else torch.float32)
        high = 2 if value.dtype == torch.bool else 3
        return torch.randint(0, high, shape, generator=generator).to(value.dtype)


def _shaped(normal: torch.Tensor, kind: str, axis: Axes) -> torch.Tensor:
    """Normal values made to spread over six decades, to be whole numbers, or to be far away in sample 1."""
    if kind == "spread":
        return normal * 10 ** normal.flatten().roll(1).view(normal.shape)
    if kind == "equal":
        return normal.round()
    if kind == "far" and isinstance(axis, SampleAxis):
        far = torch.tensor([1.0, 1e3, 1.0], dtype=normal.dtype)
        sizes = [1] * (normal.ndim + 2)
        sizes[axis.dim + 1] = SIZE
        unfolded: torch.Tensor = normal.unflatten(axis.dim, (axis.outer, SIZE, axis.inner)) * far.view(sizes)
        return unfolded.flatten(axis.dim, axis.dim + 2)
    return normal
