"""Where the samples lie in a value, and where they go through views, permutations, broadcasts and reductions.

A value carries its samples in one dim of size `outer * B * inner`, laid out row-major (`SampleAxis`).  Its *single*
shape is its shape in the program of one sample (B = 1).  All functions here are pure and know no graph: they take
shapes and axes, return axes, and raise `Misfit` with the reason where no axis exists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from psg_fx.graph.facts import SampleAxis


class Misfit(ValueError):
    """The samples do not lie in one dim as outer * B * inner; the text says why."""


class Ragged(Misfit):
    """A size depends on the data."""


@dataclass(frozen=True)
class Single:
    """A shape at B = 1, and the one dim whose size is a multiple of B (None: the shape does not know B)."""

    shape: tuple[int, ...]
    dim: int | None = None

    @property
    def factor(self) -> int:
        """C where the size of `dim` is c * B."""
        return 1 if self.dim is None else self.shape[self.dim]


@functools.lru_cache(maxsize=4096)
def multiple(size: sympy.Expr, batch: sympy.Symbol) -> int:
    """C of a size c * B."""
    ratio = sympy.cancel(sympy.expand(size) / batch)
    if not ratio.is_Integer:
        raise Misfit(f"the size {size.subs(batch, sympy.Symbol('B'))} is not a whole multiple of the batch size")
    return int(ratio)


def single(shape: Sequence[sympy.Expr | int], batch: sympy.Symbol) -> Single:
    """`(4*B, 3)` -> `Single((4, 3), dim=0)`; refuses two dims with B and sizes such as B + 1."""
    sizes: list[int] = []
    dims: list[int] = []
    for dim, size in enumerate(shape):
        if isinstance(size, int) or size.is_Integer:
            sizes.append(int(size))
        elif batch in size.free_symbols and size.free_symbols == {batch}:
            sizes.append(multiple(size, batch))
            dims.append(dim)
        else:
            raise Ragged(f"the size of dim {dim} depends on the data")
    if len(dims) > 1:
        raise Misfit(f"dims {dims[0]} and {dims[1]} both have the size of the batch, so each sample meets every other")
    return Single(tuple(sizes), dims[0] if dims else None)


def positive(dim: int, ndim: int) -> int:
    """A dim counted from the left."""
    return dim % ndim if ndim else 0


def sizes_around(shape: Sequence[int], axis: SampleAxis) -> tuple[int, int]:
    """(P, R) of the flat layout [P, B, R] of a value: how many elements lie outside and inside of the samples."""
    return math.prod(shape[: axis.dim]) * axis.outer, math.prod(shape[axis.dim + 1 :]) * axis.inner


def through_view(axis: SampleAxis, old: Sequence[int], new: Single) -> SampleAxis:
    """The axis after a reshape from the single shape `old`.

    Flat layout [P, B, R] is kept; the new dim d with B must split it: P = prod(new[:d]) * outer and
    R = inner * prod(new[d+1:]).  `[B, T, D] -> [T, B, D]` by a view has P = 1 against prod = T: refused.
    """
    if new.dim is None:
        raise Misfit("the new shape does not keep the batch size")
    if 0 in new.shape or 0 in old:
        if axis.outer * axis.inner == new.factor:  # of no elements it is true that each lies with its sample
            return moved(axis, new.dim)
        raise Misfit("an empty value is reshaped")
    left, right = sizes_around(old, axis)
    before, after = math.prod(new.shape[: new.dim]), math.prod(new.shape[new.dim + 1 :])
    if left % before or right % after:
        raise Misfit(
            f"the samples are laid out as {left}·B·{right} elements, but the new dim {new.dim} expects "
            f"{before} elements before and {after} after it, so a row of it holds parts of several samples"
        )
    found = SampleAxis(new.dim, left // before, right // after)
    if found.outer * found.inner != new.factor:
        raise Misfit(f"the new dim {new.dim} has {new.factor}·B elements instead of {found.outer * found.inner}·B")
    return found


def moved(axis: SampleAxis, dim: int) -> SampleAxis:
    """The same samples in another dim."""
    return SampleAxis(dim, axis.outer, axis.inner)


def through_permute(axis: SampleAxis, dims: Sequence[int]) -> SampleAxis:
    """Output dim k is input dim dims[k]."""
    ndim = len(dims)
    return moved(axis, [positive(d, ndim) for d in dims].index(axis.dim))


def through_transpose(axis: SampleAxis, ndim: int, first: int, second: int) -> SampleAxis:
    """Swap two dims."""
    first, second = positive(first, ndim), positive(second, ndim)
    return moved(axis, {first: second, second: first}.get(axis.dim, axis.dim))


def through_movedim(axis: SampleAxis, ndim: int, source: Sequence[int], destination: Sequence[int]) -> SampleAxis:
    """`torch.movedim`."""
    sources = [positive(d, ndim) for d in source]
    targets = [positive(d, ndim) for d in destination]
    rest = iter(d for d in range(ndim) if d not in sources)
    order = [sources[targets.index(d)] if d in targets else next(rest) for d in range(ndim)]
    return through_permute(axis, order)


def through_broadcast(axis: SampleAxis, ndim: int, out_ndim: int) -> SampleAxis:
    """Broadcasting aligns shapes from the right."""
    return moved(axis, axis.dim + out_ndim - ndim)


def through_unsqueeze(axis: SampleAxis, ndim: int, dim: int) -> SampleAxis:
    """A new dim of size 1 at `dim` (counted in the output)."""
    return moved(axis, axis.dim + (positive(dim, ndim + 1) <= axis.dim))


def without_dims(axis: SampleAxis, dims: Sequence[int]) -> SampleAxis:
    """Remove dims other than the axis' own: squeeze, select, a reduction without keepdim."""
    if axis.dim in dims:
        raise Misfit(f"dim {axis.dim}, which holds the samples, is removed")
    return moved(axis, axis.dim - sum(1 for d in set(dims) if d < axis.dim))


def through_reduction(axis: SampleAxis, dims: Sequence[int], keepdim: bool) -> SampleAxis | None:
    """The axis after a reduction over `dims` (counted from the left); None where the samples are reduced too."""
    if axis.dim in dims:
        return None
    return axis if keepdim else without_dims(axis, dims)


def fold(axis: SampleAxis, times: int, *, outside: bool) -> SampleAxis:
    """The sample dim after `repeat` (tiles lie outside) or `repeat_interleave` (copies lie inside)."""
    if outside:
        return SampleAxis(axis.dim, axis.outer * times, axis.inner)
    return SampleAxis(axis.dim, axis.outer, axis.inner * times)


def cut(axis: SampleAxis, start: int, stop: int) -> SampleAxis:
    """The part [start*B, stop*B) of the sample dim; it must hold whole blocks of B * inner."""
    if start % axis.inner or stop % axis.inner:
        raise Misfit("the part holds some samples and leaves out others")
    return SampleAxis(axis.dim, (stop - start) // axis.inner, axis.inner)


def join(axes: Sequence[SampleAxis]) -> SampleAxis:
    """Concatenation along the sample dim: blocks of B * inner after one another."""
    if len({(a.dim, a.inner) for a in axes}) != 1:
        raise Misfit("the samples are laid out differently in the values that are joined")
    return SampleAxis(axes[0].dim, sum(a.outer for a in axes), axes[0].inner)
