"""Ops in terms of simpler ones, with the same gradients, whose backward vmap runs for a symbolic batch size.

Used where the fallback runs an op that has no rule, and for ops on the way of a parameter to its use.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.op_table import formula, known, prefix_formula
from psg_fx.ops.define import is_own

aten = torch.ops.aten


@formula(aten.cdist.default)
def cdist(a: torch.Tensor, b: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """d[.., i, j] = ‖a[.., i, :] - b[.., j, :]‖_p.  As there, of several largest differences each has the gradient
    (p = ∞), which the norm of a vector shares among them.
    """
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    distance: torch.Tensor = torch.linalg.vector_norm(difference, p, -1)
    if p != math.inf:
        return distance
    distance = distance.detach()
    change = difference.sgn().detach() * (difference - difference.detach())
    return distance + torch.where(difference.detach().abs() == distance.unsqueeze(-1), change, 0).sum(-1)


@formula(aten.cosine_similarity.default)
def cosine_similarity(a: torch.Tensor, b: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    """a·b / (max(‖a‖, ε) max(‖b‖, ε)), whose gradient is that of the norms also where they are less than ε."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = torch.broadcast_tensors(a, b)
    similarity: torch.Tensor = (_normed(a.to(dtype), dim, eps) * _normed(b.to(dtype), dim, eps)).sum(dim)
    return similarity


def _normed(x: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    return x / (norm + (norm.clamp_min(eps) - norm).detach())


@formula(aten.scaled_dot_product_attention.default)
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """softmax(Q Kᵀ / √d) V (Vaswani et al. 2017, arXiv:1706.03762), without a mask, dropout or shared heads."""
    if attn_mask is not None or dropout_p or is_causal or enable_gqa:
        return aten.scaled_dot_product_attention(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.softmax(-1) @ value


@formula(aten.einsum.default)
def einsum(equation: str, tensors: Sequence[torch.Tensor], path: Sequence[int] | None = None) -> torch.Tensor:
    """A letter that an operand repeats stands for its diagonal."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or all(len(set(term)) == len(term) for term in terms):
        return aten.einsum(equation, tensors, path=path)  # type: ignore[no-any-return]
    once = ["".join(dict.fromkeys(term)) for term in terms]
    diagonals = [_diagonal(x, term, new) for x, term, new in zip(tensors, terms, once, strict=True)]
    return aten.einsum(f"{','.join(once)}->{right}", diagonals, path=path)  # type: ignore[no-any-return]


def _diagonal(x: torch.Tensor, term: str, once: str) -> torch.Tensor:
    """x[.., i, .., i, ..] with one dim for each letter."""
    if term == once:
        return x
    sizes = dict(zip(term, x.shape, strict=True))
    steps = [torch.arange(sizes[k], device=x.device).view([-1 if k == own else 1 for own in once]) for k in term]
    return x[tuple(steps)]


@formula(aten.index_put.default)
def index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """With a mask that says where the same values go: y = values (accumulate: x + values) there, x elsewhere.  A place
    of no dims beside others is one of one dim, which vmap and traces know.
    """
    mask = indices[0]
    if any(i is not None and i.ndim for i in indices):
        indices = [i.reshape(1) if i is not None and not i.ndim and i.dtype is not torch.bool else i for i in indices]
    if len(indices) > 1 or mask is None or mask.dtype is not torch.bool or values.ndim > x.ndim - mask.ndim:
        return aten.index_put(x, indices, values, accumulate)  # type: ignore[no-any-return]
    places = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    return torch.where(places, x + values if accumulate else values, x)


@formula(aten.max.default)
def largest(x: torch.Tensor) -> torch.Tensor:
    """Of all elements.  As there, those that are equal share the gradient."""
    return x.amax(tuple(range(x.ndim)))


@formula(aten.min.default)
def least(x: torch.Tensor) -> torch.Tensor:
    """The same."""
    return x.amin(tuple(range(x.ndim)))


def _shared(target: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """An op that takes one element of x, whose gradient all share that are equal to it."""

    def taken(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = target(x.detach())
        if not x.is_floating_point():
            return found
        same = x.detach() == found
        share = torch.where(same & x.detach().isfinite(), x - x.detach(), 0).sum() / same.sum()
        return found + share

    return taken


for _op in (aten.median.default, aten.nanmedian.default):
    formula(_op)(_shared(_op))


def _at_places(target: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """An op that returns values of x and their places along `dim`, as a look-up at places found without gradients."""
    names = [argument.name for argument in target._schema.arguments]

    def picked(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        places = target(x.detach(), *args, **kwargs)[1]
        flat = torch.arange(x.numel(), device=x.device).reshape(x.shape).gather(given.get("dim", -1), places)
        return x.reshape(-1)[flat], places

    return picked


for _op in (aten.sort.default, aten.sort.stable, aten.topk.default):
    formula(_op)(_at_places(_op))


class Gathered(torch.fx.Interpreter):
    """Runs a graph with some ops written in others whose backward vmap runs for a symbolic batch size: those that only
    select elements as padding and indexing (vmap does not run the backward of a slice), weight_norm by its formula.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(known(target).prefix_formula or differentiated(target), args, kwargs)


def differentiated(target: Any) -> Any:
    """What is run where vmap differentiates an op: its formula, or what autograd runs in its place, or the op."""
    said = known(target)
    return said.formula or said.under_autograd or (_of_constants(target) if is_own(target) else target)


def _of_constants(op: Any) -> Callable[..., Any]:
    """An op of psg_fx's own, through which no gradient is taken: autograd would find none."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves((args, kwargs))):
            raise NotYetSupported(
                f"a gradient is taken through {op}", where=str(op),
                why="it is an op of psg_fx without a derivative here",
                fix="write what it stands for with other ops, or freeze the parameters that it reads",
            )  # fmt: skip
        return op(*args, **kwargs)

    return call


def _taken(target: Any) -> Callable[..., torch.Tensor]:
    """An op that takes elements of x, as a look-up at the places that it takes."""

    def taken(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        return x.reshape(-1)[target(places, *args, **kwargs)]

    return taken


for _op in (
    aten.diagonal.default, aten.unfold.default, aten.gather.default, aten.index_select.default,
    aten.roll.default, aten.flip.default,
):  # fmt: skip
    prefix_formula(_op)(_taken(_op))


@prefix_formula(aten.embedding.default)
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


@prefix_formula(aten._weight_norm.default)
def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    norm: torch.Tensor = torch.linalg.vector_norm(v, 2, others, keepdim=dim != -1)
    return v * (g / norm)


@prefix_formula(aten.slice.Tensor)
def _sliced(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        return x.index_select(dim, torch.arange(first, max(last, first), step, device=x.device))
    return _narrowed(x, dim, first, max(last - first, 0))


def _narrowed(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    after = x.ndim - 1 - dim % x.ndim
    return aten.constant_pad_nd(x, [0, 0] * after + [-start, start + length - x.shape[dim]])  # type: ignore[no-any-return]


@prefix_formula(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def _convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> torch.Tensor:  # fmt: skip
    """y[n,go,p] = Σ_ck patches[n,g,p,ck] W[go,ck] + bias[go]."""
    if x.ndim < weight.ndim:
        return _convolved(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
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


@prefix_formula(aten.slice_scatter.default)
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
    return torch.where(inside.view(wide), _taken(aten.index_select.default)(source, dim, nearest), x)


@prefix_formula(aten.select_scatter.default)
def _select_scattered(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """X, but `source` at one index of `dim`."""
    start = index % x.shape[dim]
    return _slice_scattered(x, source.unsqueeze(dim), dim, start, start + 1)


@prefix_formula(aten.split.Tensor)
def _split(x: torch.Tensor, size: int, dim: int = 0) -> list[torch.Tensor]:
    total = x.shape[dim]
    return _cut(x, [min(size, total - start) for start in range(0, total, size)], dim)


@prefix_formula(aten.split_with_sizes.default)
def _cut(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    starts = itertools.accumulate(sizes, initial=0)
    return [_narrowed(x, dim, start, length) for start, length in zip(starts, sizes, strict=False)]
