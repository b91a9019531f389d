"""Quantities made of products of gradients: with directions, with one another, with random matrices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from numbers import Integral
from operator import add
from typing import Any, ClassVar

import torch

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.asks import (
    Along,
    InnerProducts,
    Projected,
    Squares,
    Total,
    along_dtype,
    direction,
    projection,
    sides,
)
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Extra, Joins, Quantity, Results, Shapes, Weights, check_flag


@dataclass(frozen=True)
class Dots(Quantity):
    """⟨g_b, v⟩, the change of each loss along a direction: `out.dots` is [B].

    v is given at the call, one tensor for each parameter: `step(x, y, directions=v)`.  With a leading K on every tensor
    there are K directions and `out.dots` is [B, K]; another K compiles another graph.  count: K, which every call says
    anew, whatever is given here.  Kept in float32 or better.

    Directions are read in the dtype of the parameter, those of float16 in float32: a direction such as H⁻¹ḡ leaves the
    range of float16.
    """

    count: int | None = None
    field: ClassVar[str] = "dots"
    reads: ClassVar[tuple[str, ...]] = ("directions",)

    def __post_init__(self) -> None:
        if self.count is not None and (not _is_whole(self.count) or self.count < 1):
            raise BadArgument(
                f"count={self.count!r} is not a number of directions", where="Dots(count=...)",
                why="out.dots has a column for each", fix="leave it out: directions= says it at each call",
            )  # fmt: skip

    def resolved(self, shapes: Shapes, given: Mapping[str, Any]) -> Quantity:
        directions = given.get("directions")
        if not isinstance(directions, Mapping):
            raise _bad_directions(f"they are needed for {_some(shapes)}")
        if missing := [name for name in shapes if name not in directions]:
            raise _bad_directions(f"there is none for {_some(missing)}")
        if odd := [name for name in directions if name not in shapes]:
            raise _bad_directions(f"there is one for {_some(odd)}, of which no gradients are asked")
        counts = {_leading(name, directions[name], shape) for name, shape in shapes.items()}
        if len(counts) > 1:
            raise _bad_directions("some have a leading K and some have not, or another K")
        (count,) = counts
        if count == 0:
            raise _bad_directions("there are none: their leading K is 0")
        return replace(self, count=count)

    @property
    def variant(self) -> Hashable:
        return self.count

    def asks(self) -> tuple[Ask, ...]:
        return (Along(self.count),)

    def extras(self, gradients: Mapping[str, ParameterGradient]) -> dict[str, Extra]:
        lead = () if self.count is None else (self.count,)
        return {direction(n).name: Extra((*lead, *g.shape), along_dtype(g.dtype)) for n, g in gradients.items()}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        return {direction(name).name: given["directions"][name] for name in shapes}

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"dots": _sum(r["dots"])}

    def joins(self) -> Joins:
        return {"dots": "cat"}


def _some(names: Iterable[Any]) -> str:
    listed = list(map(str, names))
    return ", ".join(listed[:4]) + ", ..." * (len(listed) > 4)


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _leading(name: str, value: Any, shape: tuple[int, ...]) -> int | None:
    """K, or None where the direction has the shape of the parameter."""
    if isinstance(value, torch.Tensor):
        if tuple(value.shape) == shape:
            return None
        if tuple(value.shape[1:]) == shape and value.ndim == len(shape) + 1:
            return value.shape[0]
        kind = f"a tensor {list(value.shape)}"
    else:
        kind = f"a {type(value).__name__}"
    raise _bad_directions(f"that of {name} is {kind}, and the parameter is {list(shape)}")


def _bad_directions(why: str) -> BadArgument:
    return BadArgument(
        "Dots needs a direction for every parameter", where="step(inputs, targets, directions=...)", why=why,
        fix="pass a mapping from every parameter's name to a tensor of its shape, or of [K, *shape]",
    )  # fmt: skip


@dataclass(frozen=True)
class Gram(Quantity):
    """⟨g_a, g_b⟩ for all pairs of samples in the batch: `out.gram` is [B, B].  Accumulated in float32 or better."""

    field: ClassVar[str] = "gram"

    def asks(self) -> tuple[Ask, ...]:
        return (InnerProducts(),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"gram": _sum(r["gram"])}

    def joins_of_processes(self) -> Joins:
        return {"gram": "local"}


@dataclass(frozen=True)
class SecondMoment(Quantity):
    """Σ_b g_b² / B elementwise, or with `centered` the variance Σ_b (g_b - ḡ)² / B: `out.second_moment[name]`, kept in
    float32 or better.

    The variance is computed as the second moment less ḡ², so that its rounding error is relative to the second moment:
    of a model in half precision, whose gradients are rounded before they are squared, some ε of its dtype.
    The simple noise scale (McCandlish et al. 2018, arXiv:1812.06162) is `Σ second_moment / Σ mean_grad²` over all
    elements, with `quantities=[SecondMoment(centered=True), MeanGrad()]`.  The variance of several batches or processes
    follows from those two, as exactly as `mean_grad` is kept, in the dtype of the parameters.
    """

    centered: bool = False
    field: ClassVar[str] = "second_moment"

    def __post_init__(self) -> None:
        check_flag("SecondMoment", "centered", self.centered)

    def asks(self) -> tuple[Ask, ...]:
        return (Squares(), Total()) if self.centered else (Squares(),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        found = {name: value / batch for name, value in r["squares"].items()}
        if self.centered:
            means = {name: r["total"][name] / batch for name, value in found.items()}
            found = {name: (value - means[name].square()).clamp(min=0) for name, value in found.items()}
        return {"second_moment": found}

    def joins(self) -> Joins:
        return {} if self.centered else {"second_moment": "mean"}

    def joins_of_processes(self) -> Joins:
        return {"second_moment": "variance"} if self.centered else self.joins()


@dataclass(frozen=True)
class Projection(Quantity):
    """Random projections whose inner products are those of the gradients in expectation: `out.projection` is [B, k].

    A matrix (the first dim against all others) is projected on both sides, Pᵀ g_b Q with P and Q of `rank` columns
    (Choe et al. 2024, arXiv:2405.13954), a vector by one matrix; k is the sum over parameters of the numbers that are
    left.  Entries are Gaussian with variance 1/rank, drawn from `seed` and the parameter's name; a side of at most
    `rank` elements is kept as it is, so a large rank keeps everything.
    """

    rank: int = 8
    seed: int = 0
    field: ClassVar[str] = "projection"

    def __post_init__(self) -> None:
        if not _is_whole(self.seed):
            raise BadArgument(
                f"seed={self.seed!r} is not a whole number", where="Projection(seed=...)",
                why="the same seed draws the same matrices in every process", fix="an int, e.g. seed=0",
            )  # fmt: skip
        if not _is_whole(self.rank) or self.rank < 1:
            raise BadArgument(
                f"rank={self.rank!r} is not a number of columns", where="Projection(rank=...)",
                why="each side of a matrix is projected to so many numbers", fix="a positive int, e.g. rank=8",
            )  # fmt: skip

    def asks(self) -> tuple[Ask, ...]:
        return (Projected(self.rank),)

    def extras(self, gradients: Mapping[str, ParameterGradient]) -> dict[str, Extra]:
        found = {}
        for name, gradient in gradients.items():
            for new, side in zip("PQ", sides(gradient.shape), strict=False):
                if side > self.rank:
                    matrix = self.matrix(name, new, side).to(along_dtype(gradient.dtype))
                    found[projection(name, new).name] = Extra((side, self.rank), matrix.dtype, matrix)
        return found

    def matrix(self, name: str, side: str, rows: int) -> torch.Tensor:
        """P or Q (`side`) of a parameter, `[rows, rank]` in float64."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {side} {name}".encode()))
        return torch.randn(rows, self.rank, generator=generator, dtype=torch.float64) / math.sqrt(self.rank)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"projection": torch.cat(list(r["projection"].values()), 1)}

    def joins(self) -> Joins:
        return {"projection": "cat"}


def _sum(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor = reduce(add, values.values())
    return total
