"""A custom op is tried out: on random values, does row i of the output come from row i of the inputs alone?

The op on a whole batch, restricted to sample i, must equal the op on sample i alone; a changed sample j then leaves row
i as it is.  Ops may mix at some sizes or for some values only, so there are batches that are longer than blocks and
tiles usually are, and no multiple of them, and values that are large, tiny, equal, or far apart between samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxes, SampleAxis
from psg_fx.graph.sample_axis import Misfit, Single, single

from .arguments import op_name
from .refused import FIX, mixed, no_place, not_shown
from .values import Result, tensors

SIZES, SIZE, LARGEST, LONG = (64, 65, 130, 1031), 3, 2**24, 2**20
USUAL_SIZES = ("normal", "normal, again")
FURTHER = ("spread", "equal", "constant", "far", "scales", "large", "tiny", "huge", "minute")
AT_LENGTH = ("normal", "equal", "scales")
_FACTORS = {"large": 1e4, "tiny": 1e-4, "huge": 1e15, "minute": 1e-15}


def probe(node: Node, batch: sympy.Symbol, known: Mapping[Node, SampleAxes], notes: list[str]) -> Result:
    """The sample axes of the outputs of an op without a rule, or a refusal."""
    for axes in known.values():
        if isinstance(axes, tuple):
            raise not_shown(node, "it has no rule, and an input is a tuple")
    outs = _layouts(node, batch)
    trial = Trial(node, batch, known)
    possible = [list(candidates(o.dim, o.factor)) for o in outs]
    if not any(o.dim is not None for o in outs):
        raise mixed(node, "no dim of its output holds the samples of its inputs", FIX)
    try:
        trial.require_the_same_twice()
        for outcome in trial.draws():
            for place, options in enumerate(possible):
                possible[place] = [axis for axis in options if outcome.agrees(place, axis)]
    except Exception as error:
        if isinstance(error, NotYetSupported):
            raise
        raise not_shown(node, f"it has no rule, and trying it out failed: {type(error).__name__}: {error}") from error
    if not all(possible):
        raise mixed(node, "tried out on random values, a sample's rows change with the other samples", FIX)
    notes.append(f"{op_name(node)} (%{node.name}) has no rule; you vouch for it, and its samples were found apart by "
                 "trying it out")  # fmt: skip
    chosen = tuple(c[0] for c in possible)
    return Result(chosen[0] if isinstance(node.meta["val"], torch.Tensor) else chosen)


def _layouts(node: Node, batch: sympy.Symbol) -> list[Single]:
    try:
        return [single(facts.shape(tensor), batch) for tensor in tensors(node.meta["val"])]
    except Misfit as misfit:
        raise no_place(node, misfit) from None


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


def close(found: torch.Tensor, expected: torch.Tensor, floor: float = 1e-2) -> bool:
    """Equal up to rounding, relative to the entry and to the usual size of the entries, or to `floor`."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not facts.is_differentiable(found):
        return torch.equal(found, expected)
    finite = expected.abs()[torch.isfinite(expected)].double()
    usual = max(float(finite.median()), floor) if finite.numel() else 1.0
    tolerance = max(1e-6, 16 * torch.finfo(expected.dtype).eps)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * usual, equal_nan=True)


@dataclass(frozen=True)
class Outputs:
    """The outputs on a batch, on some of its samples alone, and how large the values are."""

    whole: list[torch.Tensor]
    alone: Mapping[int, list[torch.Tensor]]
    scale: float

    def agrees(self, place: int, axis: SampleAxis | None) -> bool:
        """Whether an output holds in its rows of sample i what the op returns for sample i."""
        whole = self.whole[place]
        return all(close(take(whole, axis, i), rows[place], 1e-2 * self.scale) for i, rows in self.alone.items())


class Trial:
    """One op with random arguments, for the whole batch and for some of its samples."""

    def __init__(self, node: Node, batch: sympy.Symbol, known: Mapping[Node, SampleAxes]) -> None:
        self.node, self.batch, self.known = node, batch, known

    def draws(self) -> Iterator[Outputs]:
        """The outputs for each kind of values and each size; the op must run on the ordinary ones."""
        for kind in USUAL_SIZES:
            yield self.run(kind, SIZE)
        further = [(kind, SIZE) for kind in FURTHER]
        further += [(kind, size) for size in SIZES if self.largest(size) <= LONG for kind in AT_LENGTH]
        for kind, size in further:
            try:
                found = self.run(kind, size)
            except Exception:  # such values are not in its domain: a singular matrix, say
                continue
            yield found

    def require_the_same_twice(self) -> None:
        """What draws at random cannot be tried out."""
        values = self.values(USUAL_SIZES[0], SIZE)
        given = {n: self.number(n, SIZE) if v is None else v for n, v in values.items()}
        if not all(close(a, b) for a, b in zip(self.call(given), self.call(given), strict=True)):
            raise not_shown(self.node, "it gives other values each time it runs")

    def largest(self, size: int) -> int:
        """The number of entries of the largest argument or output."""
        nodes = self.node, *self.node.all_input_nodes
        shapes = [facts.shape(t) for n in nodes for t in facts.tensors(n.meta.get("val"))]
        return max(torch.Size([facts.at(s, self.batch, size) for s in shape]).numel() for shape in shapes)

    def run(self, kind: str, size: int) -> Outputs:
        """The outputs on the batch, and on the first, last and some other samples alone."""
        drawn = self.values(kind, size)
        whole = self.call({n: self.number(n, size) if v is None else v for n, v in drawn.items()})
        tried = sorted({i for i in (0, 1, 2, size // 2, 63, 64, size - 2, size - 1) if i < size})
        alone = {i: self.call({n: self.pick(n, v, i) for n, v in drawn.items()}) for i in tried}
        return Outputs(whole, alone, _FACTORS.get(kind, 1.0))

    def values(self, kind: str, size: int) -> dict[Node, Any]:
        """A value for each tensor among the arguments; None for numbers."""
        if self.largest(SIZE) > LARGEST:
            raise not_shown(self.node, "it has no rule, and its arguments are too large to try it out")
        generator = torch.Generator().manual_seed(size + (USUAL_SIZES + FURTHER).index(kind))
        return {n: self.draw(n, generator, kind, size) for n in self.node.all_input_nodes}

    def call(self, values: Mapping[Node, Any]) -> list[torch.Tensor]:
        """The op on concrete values."""
        args = torch.fx.map_arg(self.node.args, lambda n: values[n])
        kwargs = torch.fx.map_arg(self.node.kwargs, lambda n: values[n])
        assert callable(self.node.target)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return tensors(self.node.target(*args, **kwargs))

    def pick(self, node: Node, value: Any, i: int) -> Any:
        """An argument for sample i alone."""
        if value is None:
            return self.number(node, 1)
        axis = self.known.get(node)
        return take(value, axis, i).contiguous() if isinstance(axis, SampleAxis) else value

    def number(self, node: Node, size: int) -> Any:
        """A size argument at one batch size."""
        value = node.meta["val"]
        return facts.at(facts.expr(value), self.batch, size)

    def draw(self, node: Node, generator: torch.Generator, kind: str, size: int) -> Any:
        """A random tensor of the node's shape, dtype and device; None for numbers."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        shape = [facts.at(s, self.batch, size) for s in facts.shape(value)]
        if value.is_complex():
            drawn = torch.randn(shape, generator=generator, dtype=torch.complex128)
        elif value.is_floating_point():
            normal = torch.randn(shape, generator=generator, dtype=torch.float64)
            drawn = _shaped(normal, kind, self.known.get(node), size)
        else:
            drawn = torch.randint(0, 2 if value.dtype == torch.bool else 3, shape, generator=generator)
        return drawn.to(device=value.device, dtype=value.dtype)


def _shaped(normal: torch.Tensor, kind: str, axis: SampleAxes, size: int) -> torch.Tensor:
    """Normal values made to spread over six decades, to be whole numbers or all the same, large or tiny, to be far away
    in sample 1, or to have a scale of their own in each sample.
    """
    if kind == "spread":
        return normal * 10 ** normal.flatten().roll(1).view(normal.shape)
    if kind == "equal":
        return normal.round()
    if kind == "constant":
        return torch.ones_like(normal)
    if kind in _FACTORS:
        return normal * _FACTORS[kind]
    if kind in ("far", "scales") and isinstance(axis, SampleAxis):
        number = torch.arange(size, dtype=normal.dtype)
        scale = torch.where(number == 1, 1e3, 1.0) if kind == "far" else 10 ** (number % 7 - 3)
        sizes = [1] * (normal.ndim + 2)
        sizes[axis.dim + 1] = size
        unfolded: torch.Tensor = normal.unflatten(axis.dim, (axis.outer, size, axis.inner)) * scale.view(sizes)
        return unfolded.flatten(axis.dim, axis.dim + 2)
    return normal
