"""Plain functions on rows of which some do not count, traced where a mask picks the others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from psg_fx.graph.facts import SampleAxis
from psg_fx.op_table import over_kept_rows
from psg_fx.tensors import accumulation_dtype

aten = torch.ops.aten


def apart(mask: Tensor, axis: SampleAxis | None) -> Tensor:
    """`[B, S]`: what a sample has of the mask; `[1, S]` if it has no samples."""
    return together(mask, axis, 0, mask.ndim)[:, 0, :, 0]


def together(x: Tensor, axis: SampleAxis | None, at: int, width: int) -> Tensor:
    """`[B, L, S, R]`: L and R are what lies before and after the `width` dims from `at`, in which the samples lie as
    in the mask; `[1, L, S, R]` if it has none.
    """
    lead, trail = math.prod(x.shape[:at]), math.prod(x.shape[at + width :])
    if axis is None:
        return x.reshape(1, lead, math.prod(x.shape[at : at + width]), trail)
    dim = at + axis.dim
    before, after = math.prod(x.shape[at:dim]), math.prod(x.shape[dim + 1 : at + width])
    samples = x.shape[dim] // (axis.outer * axis.inner)
    apart = x.reshape(lead, before * axis.outer, samples, axis.inner * after, trail)
    return apart.permute(2, 0, 1, 3, 4).reshape(samples, lead, before * axis.outer * axis.inner * after, trail)


@over_kept_rows(aten.sum.default, aten.sum.dim_IntList)
def _sum(x: Tensor, kept: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    x = torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))
    return x.sum(dtype=dtype) if dim is None else x.sum(dim, keepdim, dtype=dtype)


@over_kept_rows(aten.mean.default, aten.mean.dim)
def _mean(x: Tensor, kept: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    wanted = dtype or x.dtype
    total = _sum(x, kept, dim, keepdim, accumulation_dtype(wanted))
    dims = range(x.ndim) if not dim else [d % x.ndim for d in dim]
    others = 1
    for d in dims:
        others = others * (1 if kept.shape[d] != 1 else x.shape[d])
    return (total / (kept.sum() * others)).to(wanted)


@over_kept_rows(aten.linalg_vector_norm.default)
def _norm(
    x: Tensor, kept: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    x = torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))
    found: Tensor = torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype)
    return found


@over_kept_rows(aten.any.default)
def _any(x: Tensor, kept: Tensor) -> Tensor:
    return (x.ne(0) & kept).any()


@over_kept_rows(aten.all.default)
def _all(x: Tensor, kept: Tensor) -> Tensor:
    return (x.ne(0) | ~kept).all()


@over_kept_rows(aten.min.default, aten.amin.default)
def _min(x: Tensor, kept: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return _of_some(torch.where(kept, x, _extreme(x.dtype, "max")).amin(dim, keepdim), kept)


@over_kept_rows(aten.max.default, aten.amax.default)
def _max(x: Tensor, kept: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return _of_some(torch.where(kept, x, _extreme(x.dtype, "min")).amax(dim, keepdim), kept)


def _extreme(dtype: torch.dtype, which: str) -> Any:
    """What no other number of a dtype is above, or below."""
    if dtype.is_floating_point:
        return float("inf") if which == "max" else -float("inf")
    return which == "max" if dtype is torch.bool else getattr(torch.iinfo(dtype), which)


def _of_some(found: Tensor, kept: Tensor) -> Tensor:
    """NaN where there are no rows at all, of which torch knows no extreme."""
    return torch.where(kept.any(), found, float("nan")) if found.is_floating_point() else found


def last_choice(kept: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a row is written, and with what: the last of its choices that is picked.  `[N, k, ..]` -> `[N, ..]`.

    Those that do not stand have the derivative of the place too, as in torch.
    """
    if kept.shape[1] == 1:
        return kept.squeeze(1), rows.squeeze(1)
    last = kept & (kept.to(torch.int64).flip(1).cumsum(1).flip(1) == 1)
    zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
    found = torch.where(last, rows, zero).sum(1, dtype=rows.dtype)
    if rows.is_floating_point():
        found = found + torch.where(kept & ~last & rows.isfinite(), rows - rows.detach(), zero).sum(1)
    return kept.any(1), found
