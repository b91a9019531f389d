"""Products of rows with the matrix of the expert that each is routed to.

    y[r, o] = Σ_i x[r, i] w[ids[r], i, o]           expert_mm
    p[e, i, o] = Σ_{r: ids[r] = e} x[r, i] y[r, o]  expert_outer, the gradient of w
    Σ_{i,o} p[e, i, o]²                             expert_squares; p is not stored, or not even computed: of few rows
                                                    it is Σ_{r,s} (x[r]·x[s]) (y[r]·y[s])

Rows lie in any order.  Inside, they are sorted by expert and multiplied one expert after the other, as mixtures of
experts do it themselves; outside there is no order of all samples' rows.  Rows whose id is no expert's give zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.flop_counter import register_flop_formula

from psg_fx.op_table import under_autograd
from psg_fx.ops.define import define_op
from psg_fx.tensors import accumulation_dtype


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The rows in order of their experts, and how many each expert has; those of none come last."""
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)
    return known.argsort(), torch.bincount(known, minlength=experts + 1)


def _grouped_on_device(x: Tensor) -> bool:
    """Whether torch has a kernel for all experts at once, which does not wait for the device."""
    return x.device.type == "cuda" and x.dtype is torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] >= 8


def _expert_mm(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    order, counts = _sorted(ids, w.shape[0])
    y = x.new_empty(x.shape[0], w.shape[2])
    if _grouped_on_device(x):
        found = torch._grouped_mm(x[order], w, counts[:-1].cumsum(0).to(torch.int32))
        y.index_copy_(0, order, found)
        return torch.where(((ids >= 0) & (ids < w.shape[0])).unsqueeze(1), y, 0.0)
    *known, unknown = order.split(counts.tolist())
    for matrix, rows in zip(w, known, strict=True):
        if len(rows):
            y.index_copy_(0, rows, x.index_select(0, rows) @ matrix)
    return y.index_fill_(0, unknown, 0.0) if len(unknown) else y


def _expert_outer(x: Tensor, y: Tensor, ids: Tensor, experts: int) -> Tensor:
    if _lie_in_order(ids, experts):
        sizes = torch.bincount(ids, minlength=experts).tolist()
    else:
        order, counts = _sorted(ids, experts)
        *sizes, unknown = counts.tolist()
        order = order[: len(order) - unknown]
        x, y = x.index_select(0, order), y.index_select(0, order)
    if _grouped_on_cpu(x, y):
        x, y = x.contiguous(), y.contiguous()  # rows in order are as they lie
        return F.grouped_mm(x.t(), y, offs=torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32))
    found = x.new_empty(experts, x.shape[1], y.shape[1])
    for product, a, b in zip(found.unbind(), x.split(sizes), y.split(sizes), strict=True):
        torch.mm(a.t(), b, out=product)
    return found


def _lie_in_order(ids: Tensor, experts: int) -> bool:
    """Whether the rows lie in order of their experts, and each has one; False where that is not known at once."""
    if ids.device.type != "cpu" or not len(ids):
        return False
    return bool(ids[0] >= 0) and bool(ids[-1] < experts) and bool((ids[1:] >= ids[:-1]).all())


def _grouped_on_cpu(x: Tensor, y: Tensor) -> bool:
    """Whether torch's loop over products takes these: rows whose length is a multiple of 16 bytes."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return all(t.shape[1] * t.element_size() % 16 == 0 for t in (x, y))


def _expert_squares(x: Tensor, y: Tensor, ids: Tensor, experts: int) -> Tensor:
    order, counts = _sorted(ids, experts)
    dtype, wide, formed = accumulation_dtype(x.dtype), x.shape[1] + y.shape[1], x.shape[1] * y.shape[1]
    found = x.new_zeros(experts, dtype=dtype)
    sizes: dict[int, list[int]] = {}
    start = 0
    for expert, count in enumerate(counts.tolist()[:-1]):
        if count * wide < formed:
            sizes.setdefault(_rounded(count), []).append(expert)
        else:
            rows = order[start : start + count]
            a, b = x.index_select(0, rows).to(dtype), y.index_select(0, rows).to(dtype)
            found[expert] = (a.t() @ b).square_().sum()
        start += count
    starts = counts.cumsum(0).sub_(counts)
    for size, alike in sizes.items():
        if size:
            of = torch.tensor(alike, device=x.device)
            found.index_copy_(0, of, _by_grams(x, y, order, starts[of], counts[of], size, dtype))
    return found


def _rounded(count: int) -> int:
    """The least of the sizes in which experts are multiplied together that has room for so many rows: multiples of 4
    up to 32, of 8 up to 64, of 16 up to 128 and so on.
    """
    step = max((1 << max(count - 1, 0).bit_length()) // 8, 4)
    return -(-count // step) * step


def _by_grams(
    x: Tensor, y: Tensor, order: Tensor, starts: Tensor, counts: Tensor, size: int, dtype: torch.dtype
) -> Tensor:
    """Σ_{r,s} (x[r]·x[s]) (y[r]·y[s]) of some experts at once, each with up to `size` rows."""
    places = torch.arange(size, device=x.device)
    rows = order[(starts.unsqueeze(1) + places).clamp_(max=len(order) - 1)]
    a, b = (t.index_select(0, rows.view(-1)).to(dtype).view(*rows.shape, -1) for t in (x, y))
    products = torch.bmm(a, a.transpose(1, 2)).mul_(torch.bmm(b, b.transpose(1, 2)))
    kept = places < counts.unsqueeze(1)
    return products.masked_fill_((kept.unsqueeze(2) & kept.unsqueeze(1)).logical_not_(), 0.0).sum((1, 2))


def _by_all_experts(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """Each row by all matrices, of which it takes its own: as many rows for an expert in every call."""
    found = x.new_zeros(x.shape[0], w.shape[2])
    for expert, matrix in enumerate(w):
        found = torch.where((ids == expert).unsqueeze(1), x @ matrix, found)
    return found


expert_mm = define_op(
    "expert_mm(Tensor x, Tensor w, Tensor ids) -> Tensor", _expert_mm,
    lambda x, w, _: x.new_empty(x.shape[0], w.shape[2]), _by_all_experts,
)  # fmt: skip
expert_outer = define_op(
    "expert_outer(Tensor x, Tensor y, Tensor ids, SymInt experts) -> Tensor", _expert_outer,
    lambda x, y, _, experts: x.new_empty(experts, x.shape[1], y.shape[1]),
)  # fmt: skip


expert_squares = define_op(
    "expert_squares(Tensor x, Tensor y, Tensor ids, SymInt experts) -> Tensor", _expert_squares,
    lambda x, y, _, experts: x.new_empty(experts, dtype=accumulation_dtype(x.dtype)),
)  # fmt: skip


def _grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    places = torch.arange(x.shape[0], device=x.device)
    return _expert_mm(x, w, torch.searchsorted(offs.to(torch.int64), places, right=True))


grouped_mm = define_op(
    "grouped_mm(Tensor x, Tensor w, Tensor offs) -> Tensor", _grouped_mm,
    lambda x, w, _: x.new_empty(x.shape[0], w.shape[2]),
)  # fmt: skip
"""`torch.nn.functional.grouped_mm` of sorted rows, in any dtype; expert e has rows offs[e - 1] to offs[e]."""


class _Differentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ids)
        y: Tensor = expert_mm(x, w, ids)
        return y

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, ids = ctx.saved_tensors
        of_x = expert_mm(cotangent, w.transpose(1, 2), ids) if ctx.needs_input_grad[0] else None
        of_w = expert_outer(x, cotangent, ids, w.shape[0]) if ctx.needs_input_grad[1] else None
        return of_x, of_w, None


@under_autograd(expert_mm)
def _differentiable(x: Tensor, w: Tensor, ids: Tensor) -> Any:
    """`expert_mm`, as autograd runs it."""
    return _Differentiable.apply(x, w, ids)  # type: ignore[no-untyped-call]


@register_flop_formula(torch.ops.psg_fx.expert_mm)
def _flops(x: Sequence[int], w: Sequence[int], ids: Sequence[int], **shapes: Any) -> int:
    """2 · rows · inputs · outputs."""
    return 2 * x[0] * x[1] * w[2]


@register_flop_formula([torch.ops.psg_fx.expert_outer, torch.ops.psg_fx.expert_squares])
def _flops_outer(x: Sequence[int], y: Sequence[int], *rest: Any, **shapes: Any) -> int:
    """2 · rows · inputs · outputs."""
    return 2 * x[0] * x[1] * y[1]
