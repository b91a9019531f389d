"""Functions of torch that read sizes as numbers, or look at values to check them, as their formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx.op_table import at_capture


@at_capture(torch.kron, Tensor.kron)
def kron(input: Tensor, other: Tensor) -> Tensor:
    """y[.., i·m + k, ..] = a[.., i, ..] b[.., k, ..], m the size of b in that dim."""
    dims = max(input.dim(), other.dim())
    a, b = (t.reshape(*[1] * (dims - t.dim()), *t.shape) for t in (input, other))
    shape = [n * m for n, m in zip(a.shape, b.shape, strict=True)]
    outer = a.reshape(*[part for n in a.shape for part in (n, 1)]) * b.reshape(*[p for m in b.shape for p in (1, m)])
    return outer.reshape(shape)


@at_capture(F.one_hot)
def one_hot(tensor: Tensor, num_classes: Any = -1) -> Tensor:
    """y[.., k] = 1 if x[..] == k, else 0: of as many classes as there are samples, which has no number yet."""
    if isinstance(num_classes, int):
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


@at_capture(torch.masked_select, Tensor.masked_select)
def masked_select(input: Tensor, mask: Tensor, **named: Any) -> Tensor:
    """x[m]: as many values as others that the same mask picks."""
    if named or list(map(str, input.shape)) != list(map(str, mask.shape)) or input.layout is not torch.strided:
        return torch.masked_select(input, mask, **named)
    return input[mask]


@at_capture(torch.gradient)
def gradient(input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Sequence[Tensor]:
    """(x[i + 1] - x[i - 1]) / 2h, and at the ends (x[1] - x[0]) / h, or (-3 x[0] + 4 x[1] - x[2]) / 2h of order 2."""
    dims = list(range(input.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    steps = list(spacing) if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
    plain = all(isinstance(h, (int, float)) for h in steps) and len(steps) == len(dims) and edge_order in (1, 2)
    if not plain or any(input.shape[d] <= edge_order for d in dims):
        return torch.gradient(input, spacing=spacing, dim=dim, edge_order=edge_order)
    return [_slope(input.movedim(d, -1), h, edge_order).movedim(-1, d) for d, h in zip(dims, steps, strict=True)]


def _slope(x: Tensor, h: float, edge_order: int) -> Tensor:
    inside = (x[..., 2:] - x[..., :-2]) / (2 * h)
    ends = x[..., :3], x[..., -3:].flip(-1)
    first, last = (
        (e[..., 1:2] - e[..., :1]) / h if edge_order == 1
        else (-3 * e[..., :1] + 4 * e[..., 1:2] - e[..., 2:3]) / (2 * h)
        for e in ends
    )  # fmt: skip
    return torch.cat([first, inside, -last], -1)


@at_capture(torch.cov, Tensor.cov)
def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """C[i, j] = Σₜ (x[i, t] - x̄[i]) (x[j, t] - x̄[j]) / (n - correction), of a vector its variance."""
    weighted = fweights is not None or aweights is not None
    if weighted or input.dim() > 2 or not input.is_floating_point():
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    x = input.reshape(1, -1) if input.dim() < 2 else input
    x = x - x.mean(1, keepdim=True)
    found: Tensor = x @ x.T / torch.sym_max(x.shape[1] - correction, 0)
    return found.squeeze() if input.dim() < 2 else found


@at_capture(torch.corrcoef, Tensor.corrcoef)
def corrcoef(input: Tensor) -> Tensor:
    """R[i, j] = C[i, j] / √(C[i, i] C[j, j]) between -1 and 1."""
    if input.dim() > 2 or not input.is_floating_point():
        return torch.corrcoef(input)
    c = cov(input)
    if c.dim() == 0:
        return c / c
    d = c.diagonal().sqrt()
    return (c / d[:, None] / d[None]).clamp(-1, 1)
