"""What runs in the place of ops while a graph is differentiated: torch has no backward of theirs, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from psg_fx.op_table import under_autograd

aten = torch.ops.aten


@under_autograd(aten._native_batch_norm_legit_no_training.default)
def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Batch norm on running statistics: y[b,c,..] = (x - μ[c]) (σ²[c] + ε)^-½ γ[c] + β[c].

    By its formula, because torch's own backward on CPU is wrong for a batch of one whose gradient is transposed.
    """
    wide = (-1, *[1] * (x.ndim - 2))
    scale = (variance + eps).rsqrt()
    y = (x - mean.view(wide)) * (scale if weight is None else scale * weight).view(wide)
    y = y if bias is None else y + bias.view(wide)
    return y.to(x.dtype), mean.new_empty(0), mean.new_empty(0)


@under_autograd(aten.sgn.default)
def _sign(x: Tensor) -> Tensor:
    """The sign, whose derivative is zero: torch's is a tensor without memory, which takes no symbol for its size."""
    found: Tensor = aten.sgn(x if x.is_complex() else x.detach())
    return found


@under_autograd(aten.slice_scatter.default)
def _write_slice(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A write into a slice, of complex values as pairs of real ones."""
    if not x.is_complex():
        found: Tensor = aten.slice_scatter(x, source, dim, start, end, step)
        return found
    return _as_pairs(aten.slice_scatter, x, source, dim, start, end, step)


@under_autograd(aten.select_scatter.default)
def _write_index(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """A write at one index of a dim, of complex values as pairs of real ones."""
    if not x.is_complex():
        found: Tensor = aten.select_scatter(x, source, dim, index)
        return found
    return _as_pairs(aten.select_scatter, x, source, dim, index)


def _as_pairs(write: Callable[..., Tensor], x: Tensor, source: Tensor, dim: int, *place: int | None) -> Tensor:
    pairs = (torch.view_as_real(t.resolve_conj()) for t in (x, source))
    return torch.view_as_complex(write(*pairs, dim % x.dim(), *place))


@under_autograd(aten.fractional_max_pool2d.default)
def _fractional_max_pool(x: Tensor, kernel: list[int], size: list[int], drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each window, and its place, counted through both dims: torch's backward takes no symbol for the
    batch size.
    """
    _, places = aten.fractional_max_pool2d(x.detach(), kernel, size, drawn)
    return x.flatten(-2).gather(-1, places.flatten(-2)).view(places.shape), places
