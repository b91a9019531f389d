"""Functions under `vmap` whose rules in torch do not become a graph of samples: normalisations, by their formulas,
since their samples are laid among the channels, or counted; what is picked by labels, since slices are counted; and
products with a matrix that all share on the left, A x = (xᵀ Aᵀ)ᵀ, since the matrix is turned where nothing knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx.op_table import at_capture
from psg_fx.torch_private.modes import is_transformed

_EXACT = (torch.float32, torch.float64)
"""Of others torch computes in float32 within."""


@at_capture(F.layer_norm)
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(var + eps) · weight + bias, of each block of numbers (Ba et al. 2016, arXiv:1607.06450)."""
    if not is_transformed(input) or input.dtype not in _EXACT:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    dims = tuple(range(-len(normalized_shape), 0))
    var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    return _normalised(input, mean, var, eps, weight, bias)


@at_capture(F.batch_norm)
def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(var + eps) · weight + bias with kept statistics (Ioffe, Szegedy 2015, arXiv:1502.03167)."""
    fixed = not training and running_mean is not None and running_var is not None
    if not fixed or not is_transformed(input) or input.dtype not in _EXACT:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    mean, var, weight, bias = (_of_channels(t, input) for t in (running_mean, running_var, weight, bias))
    return _normalised(input, mean, var, eps, weight, bias)


def _of_channels(tensor: Any, like: Tensor) -> Any:
    return None if tensor is None else tensor.reshape(-1, *[1] * (like.dim() - 2))


def _normalised(x: Tensor, mean: Tensor, var: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    value = (x - mean) * (var + eps).rsqrt()
    value = value if weight is None else value * weight
    return value if bias is None else value + bias


@at_capture(torch.gather, Tensor.gather)
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """y[.., k] = Σ_c x[.., c] [c = i[.., k]] along dim: torch's rule counts the slices.  NaN for indices outside."""
    if not (is_transformed(input) or is_transformed(index)) or not input.dim():
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
    x, at = input.movedim(dim, -1), index.movedim(dim, -1)
    x = x[tuple(map(slice, at.shape[:-1]))]
    hit = at.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)
    found = torch.where(hit, x.unsqueeze(-2), 0).sum(-1, dtype=x.dtype)
    if found.is_floating_point():
        found = torch.where(hit.any(-1), found, torch.nan)
    return found.movedim(-1, dim)


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """-w[y] log softmax(x)[y] of slices, `[C, ..]` or `[N, C, ..]`."""
    of_numbers = not (target.is_floating_point() or label_smoothing) and size_average is None and reduce is None
    if not (of_numbers and (is_transformed(input) or is_transformed(target))):
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )  # fmt: skip
    return _picked(F.log_softmax(input, min(input.dim() - 1, 1)), target, weight, ignore_index, reduction)


def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """-w[y] x[y] of slices."""
    is_plain = size_average is None and reduce is None
    if not (is_plain and (is_transformed(input) or is_transformed(target))):
        return F.nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)
    return _picked(input, target, weight, ignore_index, reduction)


def _picked(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """-w[y] x[y], their sum, or that divided by Σ w[y]."""
    dim = min(x.dim() - 1, 1)
    kept = target != ignore_index
    at = torch.where(kept, target, 0)
    scale = kept.to(x.dtype)
    if weight is not None:
        scale = scale * gather(weight, 0, at.flatten()).reshape(at.shape)
    each = torch.where(kept, -gather(x, dim, at.unsqueeze(dim)).squeeze(dim) * scale, 0.0)
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.sum() / scale.sum()


def _turned(product: Callable[..., Any]) -> Callable[..., Any]:
    """A x of slices x, or of slices of columns, for a matrix A that is not sliced."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 2 or not all(isinstance(a, Tensor) for a in args):
            return product(*args, **kwargs)
        a, x = args
        if is_transformed(a) or not is_transformed(x) or a.dim() != 2 or x.dim() not in (1, 2):
            return product(a, x)
        return x @ a.mT if x.dim() == 1 else (x.mT @ a.mT).mT

    return run


for _product in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv):
    at_capture(_product)(_turned(_product))
