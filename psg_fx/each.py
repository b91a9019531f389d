"""A function of one sample, run for every sample without fixing the batch size.

`torch.vmap` does this, but some of its batching rules read the batch size as a plain number, and a graph traced through
them would be right for one batch size only. So a symbolic batch is tried out first, on values of its own.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.errors import NotYetSupported
from psg_fx.formulas import FORMULAS
from psg_fx.strides import free_of_strides
from psg_fx.torch_private import core_decompositions, fake_batch, no_modes

aten = torch.ops.aten
OneSample = Callable[..., torch.Tensor]
Dims = Sequence[int | None]


def for_each_sample(one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor], what: str, where: str) -> torch.Tensor:
    """`[B, ...]`: `one` for every sample; `dims` has 0 for what is stacked and None for what all samples share.

    Tried as it is, then written out in simpler ops. `what` and `where` are for the refusal.
    """
    size: Any = next(t.shape[0] for t, dim in zip(tensors, dims, strict=True) if dim == 0)
    if not isinstance(size, torch.SymInt):
        return _mapped(one, dims, tensors)
    if _keeps_batch(one, dims, tensors):
        return _mapped(one, dims, tensors)
    simple = _written_out(one, dims, tensors)
    if simple is not None and _keeps_batch(simple, dims, tensors):
        return _mapped(simple, dims, tensors)
    raise NotYetSupported(
        f"{what} has no gradient rule, and vmap runs it for one fixed batch size only", where=where or what,
        why="the fallback is vmap over the samples, and its graph must serve every batch size",
        fix="write it with other ops (matmul, index, pointwise), or freeze the parameters that it reads",
    )  # fmt: skip


def _mapped(one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        found: torch.Tensor = torch.vmap(one, in_dims=tuple(dims))(*tensors)
    return found


def _keeps_batch(one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether vmap leaves the batch size a symbol, found out on fresh fake values of the same sizes."""
    with no_modes(), fake_batch() as (example, is_symbol):
        values = [example(t, dim == 0) for t, dim in zip(tensors, dims, strict=True)]
        try:
            make_fx(lambda *v: _mapped(one, dims, v), tracing_mode="symbolic")(*values)
        except Exception:  # vmap refuses in many ways
            return False
        return is_symbol()


def _written_out(one: OneSample, dims: Dims, tensors: Sequence[torch.Tensor]) -> OneSample | None:
    """`one` as a graph of core ops, traced on a single sample."""
    with no_modes():
        sample = [
            torch.zeros([int(s) for s in t.shape[dim == 0 :]], dtype=t.dtype, device=t.device)
            for t, dim in zip(tensors, dims, strict=True)
        ]
        try:
            return free_of_strides(
                make_fx(one, decomposition_table=core_decompositions(), tracing_mode="fake")(*sample)
            )
        except Exception:  # a decomposition that cannot be traced
            return None


class Gathered(torch.fx.Interpreter):
    """Runs a graph with some ops written in others whose backward vmap runs for a symbolic batch size: those that only
    select elements as padding and indexing (vmap does not run the backward of a slice), weight_norm by its formula.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.slice.Tensor:
            return _sliced(*args, **kwargs)
        if target is aten.split.Tensor:
            return _split(*args, **kwargs)
        if target is aten.split_with_sizes.default:
            return _cut(*args, **kwargs)
        if target in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default):
            return _convolved(*args, **kwargs)
        if target is aten.slice_scatter.default:
            return _slice_scattered(*args, **kwargs)
        if target is aten.select_scatter.default:
            x, source, dim, index = args
            start = index % x.shape[dim]
            return _slice_scattered(x, source.unsqueeze(dim), dim, start, start + 1)
        if target is aten._weight_norm.default:
            return _weight_norm(*args, **kwargs)
        if target is aten.embedding.default:
            return _looked_up(*args, **kwargs)
        if target in FORMULAS:
            return FORMULAS[target](*args, **kwargs)
        if target in _TAKES:
            return _taken(target, *args, **kwargs)
        return super().call_function(target, args, kwargs)


_TAKES = (
    aten.diagonal.default, aten.unfold.default, aten.gather.default, aten.index_select.default,
    aten.roll.default, aten.flip.default,
)  # fmt: skip


def _taken(target: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    return x.reshape(-1)[target(places, *args, **kwargs)]


def _looked_up(
    table: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if scale_grad_by_freq:
        return aten.embedding(table, ids, padding_idx, scale_grad_by_freq, sparse)  # type: ignore[no-any-return]
    if padding_idx >= 0:  # that row has no gradient
        rows = torch.arange(table.shape[0], device=table.device).unsqueeze(1)
        table = torch.where(rows == padding_idx, table.detach(), table)
    return table[ids]


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    norm: torch.Tensor = torch.linalg.vector_norm(v, 2, others, keepdim=dim != -1)
    return v * (g / norm)


def _sliced(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        return x.index_select(dim, torch.arange(first, max(last, first), step, device=x.device))
    return _narrowed(x, dim, first, max(last - first, 0))


def _narrowed(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    after = x.ndim - 1 - dim % x.ndim
    return aten.constant_pad_nd(x, [0, 0] * after + [-start, start + length - x.shape[dim]])  # type: ignore[no-any-return]


def _convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> torch.Tensor:  # fmt: skip
    """y[n,go,p] = Σ_ck patches[n,g,p,ck] W[go,ck] + bias[go]."""
    kernel = weight.shape[2:]
    stride, padding, dilation = (list(v) * (len(kernel) // len(v)) if isinstance(v, (list, tuple)) else
                                 [v] * len(kernel) for v in (stride, padding, dilation))  # fmt: skip
    x = aten.constant_pad_nd(x, [width for side in reversed(padding) for width in (side, side)])
    places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    for d, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        places = places.unfold(d, (size - 1) * apart + 1, step)[..., ::apart]
    count, out = x.shape[0], places.shape[2 : 2 + len(kernel)]
    rows = places.reshape(count, groups, x.shape[1] // groups, out.numel(), -1).transpose(2, 3).flatten(3)
    found = x.reshape(-1)[rows] @ weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)
    found = found.transpose(2, 3).reshape(count, weight.shape[0], *out)
    return found if bias is None else found + bias.view(-1, *[1] * len(kernel))


def _slice_scattered(
    x: torch.Tensor, source: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """X, but the rows of `source` at start, start + step, .. < end of `dim`."""
    size = x.shape[dim]
    first, last, step = slice(start, end, step).indices(size)
    if first >= last:
        return x
    rows = torch.arange(size, device=x.device)
    inside = (rows >= first) & (rows < last) & ((rows - first) % step == 0)
    nearest = ((rows - first) // step).clamp(0, source.shape[dim] - 1)
    wide = [-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]
    return torch.where(inside.view(wide), _taken(aten.index_select.default, source, dim, nearest), x)


def _split(x: torch.Tensor, size: int, dim: int = 0) -> list[torch.Tensor]:
    total = x.shape[dim]
    return _cut(x, [min(size, total - start) for start in range(0, total, size)], dim)


def _cut(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    starts = itertools.accumulate(sizes, initial=0)
    return [_narrowed(x, dim, start, length) for start, length in zip(starts, sizes, strict=False)]
