"""Contractions with `patches(x)[b, t, g, i]`, the im2col matrix of a convolution, built only where that pays.

x is stored as `[b, f, g·c, *space]`; t = (f, *out_space), i = (c, *kernel).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from psg_fx.cost import Device, Size, Work
from psg_fx.layout import permute
from psg_fx.network import Axes, Patches

from .base import Method, Pair, arrange

aten = torch.ops.aten


def _split(p: Pair) -> tuple[bool, Patches, Axes]:
    """Whether `a` holds the patches, their form, and their axes (b, t, g, i)."""
    first = isinstance(p.a.form, Patches)
    form = (p.a if first else p.b).form
    assert isinstance(form, Patches)
    return first, form, (p.a if first else p.b).axes


def _is_gradient(p: Pair) -> bool:
    """patches[b,t,g,i] · other[b,t,g,o] with t summed and g, i, o kept."""
    if not (isinstance(p.a.form, Patches) or isinstance(p.b.form, Patches)):
        return False
    first, _, (b, t, g, i) = _split(p)
    other = p.b if first else p.a
    rest = [x for x in other.axes if x not in (b, t, g)]
    return (
        other.dense and {b, t, g} <= set(other.axes) and len(rest) == 1 and t not in p.out
        and {g, i, rest[0]} <= set(p.out) and set(p.out) <= {b, g, i, rest[0]}
    )  # fmt: skip


def _other_axis(p: Pair) -> str:
    first, _, (b, t, g, _) = _split(p)
    other = p.b if first else p.a
    return next(x for x in other.axes if x not in (b, t, g))


def _convolution_work(p: Pair, kind: str = "conv") -> Work:
    first, form, axes = _split(p)
    other = p.b if first else p.a
    o = _other_axis(p)
    raw = p.count(axes[:1]) * _raw_per_sample(p, form, axes) * p.dtype.itemsize
    out = p.bytes(p.out)
    return Work(2 * p.count((*axes, o)), raw + p.bytes(other.axes), out, out, kind)


def _raw_per_sample(p: Pair, form: Patches, axes: Axes) -> Size:
    channels = p.sizes[axes[3]] // math.prod(form.kernel) * form.groups
    folds = p.sizes[axes[1]] // max(math.prod(form.out_space), 1)
    return channels * folds * math.prod(form.space)


def _weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, form: Patches, weight: list[int], groups: int
) -> torch.Tensor:
    """The weight gradient of an ordinary convolution of x[n, c, *space] with cotangent grad[n, o, *out_space]."""
    template = x.new_empty(weight)  # only its shape is read
    nd = len(form.kernel)
    found = aten.convolution_backward(
        grad, x, template, None, list(form.stride), list(form.padding), list(form.dilation), False, [0] * nd, groups,
        [False, True, False],
    )  # fmt: skip
    result: torch.Tensor = found[1]
    return result


class GroupedConv(Method):
    """Per-sample weight gradient with the samples as groups: one `convolution_backward` with groups = B·G.

    Rochette, Manoel, Tramel 2019, arXiv:1912.06015.  flops = 2·B·T·G·I·O.  Rate: falls with small output planes.
    """

    name = "grouped-conv"

    def applies(self, p: Pair) -> bool:
        return _is_gradient(p) and _split(p)[2][0] in p.out

    def out(self, p: Pair) -> Axes:
        _, _, (b, _, g, i) = _split(p)
        return (b, g, _other_axis(p), i)

    def work(self, p: Pair) -> Work:
        return _convolution_work(p)

    def seconds(self, p: Pair, device: Device) -> float:
        _, form, _ = _split(p)
        small = not form.out_space or form.out_space[-1] <= 4
        rate = device.extra["grouped_conv_small_output" if small else "grouped_conv_output"]
        work = self.work(p)
        channels = p.sizes[_split(p)[2][3]] // math.prod(form.kernel)
        narrow = replace(work, flops=work.flops * 8 / min(channels, 8))  # kernels work on blocks of eight channels
        return device.seconds(narrow) + float(p.count(p.out)) * rate

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, form, (sample, t, g, _) = _split(p)
        x, grad, have = (a, b, p.b.axes) if first else (b, a, p.a.axes)
        o = _other_axis(p)
        n, folds, channels = x.shape[:3]
        x = x.transpose(0, 1).reshape(folds, n * channels, *form.space)
        grad = permute(grad, [have.index(q) for q in (sample, g, o, t)])
        outputs = grad.shape[2]
        grad = grad.reshape(n * form.groups * outputs, folds, *form.out_space).transpose(0, 1)
        weight = [n * form.groups * outputs, channels // form.groups, *form.kernel]
        found = _weight_gradient(x, grad, form, weight, n * form.groups)
        return found.reshape(n, form.groups, outputs, -1)


class ConvWeight(Method):
    """The ordinary weight gradient, samples summed: `convolution_backward` as in any training step."""

    name = "conv-weight"

    def applies(self, p: Pair) -> bool:
        return _is_gradient(p) and _split(p)[2][0] not in p.out

    def out(self, p: Pair) -> Axes:
        _, _, (_, _, g, i) = _split(p)
        return (g, _other_axis(p), i)

    def work(self, p: Pair) -> Work:
        return _convolution_work(p)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, form, (sample, t, g, _) = _split(p)
        x, grad, have = (a, b, p.b.axes) if first else (b, a, p.a.axes)
        o = _other_axis(p)
        n, folds, channels = x.shape[:3]
        x = x.reshape(n * folds, channels, *form.space)
        grad = permute(grad, [have.index(q) for q in (sample, g, o, t)])
        outputs = grad.shape[2]
        grad = grad.reshape(n, form.groups * outputs, folds, *form.out_space).transpose(1, 2)
        grad = grad.reshape(n * folds, form.groups * outputs, *form.out_space)
        weight = [form.groups * outputs, channels // form.groups, *form.kernel]
        return _weight_gradient(x, grad, form, weight, form.groups).reshape(form.groups, outputs, -1)


class Shifted(Method):
    """Per-sample weight gradient, one kernel offset at a time, on shifted views of x: no K-fold copy of x.

    For depthwise convolutions each offset is a multiply and reduce, without a matrix product.
    """

    name = "shifted"

    def applies(self, p: Pair) -> bool:
        if not _is_gradient(p) or _split(p)[2][0] not in p.out:
            return False
        return math.prod(_split(p)[1].kernel) <= 49

    def out(self, p: Pair) -> Axes:
        return GroupedConv().out(p)

    def work(self, p: Pair) -> Work:
        first, form, axes = _split(p)
        other = p.b if first else p.a
        offsets = math.prod(form.kernel)
        base = _convolution_work(p, "bmm")
        read = offsets * (2 * p.count(axes) // offsets * p.dtype.itemsize + p.bytes(other.axes))
        kind = "pointwise" if p.sizes[_other_axis(p)] == 1 else "bmm"
        return Work(base.flops, read, base.written, base.out, kind, 2 * offsets)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, form, (sample, t, g, _) = _split(p)
        x, grad, have = (a, b, p.b.axes) if first else (b, a, p.a.axes)
        o = _other_axis(p)
        grad = permute(grad, [have.index(q) for q in (sample, g, o, t)])
        n, folds, channels = x.shape[:3]
        per_group = channels // form.groups
        found = []
        for view in shifted_views(x, form):
            rows = view.reshape(n, folds, form.groups, per_group, -1).permute(0, 2, 3, 1, 4)
            rows = rows.reshape(n, form.groups, per_group, -1)
            if per_group == 1 and grad.shape[2] == 1:
                found.append((rows * grad).sum(-1, keepdim=True))
            else:
                found.append(torch.matmul(grad, rows.transpose(-1, -2)))
        return torch.stack(found, -1).reshape(n, form.groups, grad.shape[2], -1)


def shifted_views(x: torch.Tensor, form: Patches) -> list[torch.Tensor]:
    """For each kernel offset (row-major) the part of padded x[b, f, c, *space] it meets, `[b, f, c, *out_space]`."""
    padded = F.pad(x, [side for pad in reversed(form.padding) for side in (pad, pad)]) if any(form.padding) else x
    found = []
    for offset in itertools.product(*(range(k) for k in form.kernel)):
        view = padded
        for axis, (k, stride, dilation, count) in enumerate(
            zip(offset, form.stride, form.dilation, form.out_space, strict=True)
        ):
            start = k * dilation
            view = view.narrow(3 + axis, start, (count - 1) * stride + 1)
            if stride > 1:
                view = view[(slice(None),) * (3 + axis) + (slice(None, None, stride),)]
        found.append(view)
    return found


def densify(x: torch.Tensor, form: Patches) -> torch.Tensor:
    """The patches as a tensor `[b, t, g, i]` in memory order (b, g, i, t)."""
    padded = F.pad(x, [side for pad in reversed(form.padding) for side in (pad, pad)]) if any(form.padding) else x
    nd = len(form.kernel)
    for axis, (k, stride, dilation, count) in enumerate(
        zip(form.kernel, form.stride, form.dilation, form.out_space, strict=True)
    ):
        reach = (k - 1) * dilation + 1
        padded = padded.narrow(3 + axis, 0, (count - 1) * stride + reach).unfold(3 + axis, reach, stride)
        if dilation > 1:
            padded = padded[..., ::dilation]
    n, folds, channels = padded.shape[:3]
    split = padded.reshape(n, folds, form.groups, channels // form.groups, *padded.shape[3:])
    space, kernel = tuple(range(4, 4 + nd)), tuple(range(4 + nd, 4 + 2 * nd))
    rows = split.permute(0, 2, 3, *kernel, 1, *space)
    per_group = channels // form.groups * math.prod(form.kernel)
    return rows.reshape(n, form.groups, per_group, folds * math.prod(form.out_space)).permute(0, 3, 1, 2)


__all__ = ["ConvWeight", "GroupedConv", "Shifted", "arrange", "densify", "shifted_views"]
