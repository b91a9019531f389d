"""Contractions with `patches(x)[b, t, g, i]`, the im2col matrix of a convolution, built only where that pays.

x is stored as `[b, f, g·c, *space]`; t = (f, *out_space), i = (c, *kernel).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from psg_fx.algebra.network import Axes, Patches
from psg_fx.ops.products.grouped_convolution import grouped_weight_gradient, weight_gradient
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods.base import Arg, Method, Pair
from psg_fx.tensors import Size, accumulation_dtype, permute


def split(p: Pair) -> tuple[Patches, Axes, Arg]:
    """The form of the patches, their axes (b, t, g, i), and the other operand."""
    patches, other = p.apart(Patches)
    assert isinstance(patches.form, Patches)
    return patches.form, patches.axes, other


def is_gradient(p: Pair) -> bool:
    """patches[b,t,g,i] · other[b,t,g,o] with t summed and g, i, o kept."""
    if not (isinstance(p.a.form, Patches) or isinstance(p.b.form, Patches)):
        return False
    _, (b, t, g, i), other = split(p)
    rest = [x for x in other.axes if x not in (b, t, g)]
    return (
        other.dense and {b, t, g} <= set(other.axes) and len(rest) == 1 and t not in p.out
        and {g, i, rest[0]} <= set(p.out) and set(p.out) <= {b, g, i, rest[0]}
    )  # fmt: skip


def other_axis(p: Pair) -> str:
    """The axis o of the other operand."""
    _, (b, t, g, _), other = split(p)
    return next(x for x in other.axes if x not in (b, t, g))


def operands(p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[Patches, torch.Tensor, torch.Tensor]:
    """The form, x as it is stored, and the other operand as `[b, g, o, t]`."""
    form, (sample, t, g, _), other = split(p)
    x, grad = (a, b) if other is p.b else (b, a)
    return form, x, permute(grad, [other.axes.index(q) for q in (sample, g, other_axis(p), t)])


def _convolution_work(p: Pair, kind: str = "conv") -> Work:
    form, axes, other = split(p)
    o = other_axis(p)
    raw = p.count(axes[:1]) * _raw_per_sample(p, form, axes) * p.dtype.itemsize
    out = p.bytes(p.out)
    return Work(2 * p.count((*axes, o)), raw + p.bytes(other.axes), out, kind)


def _raw_per_sample(p: Pair, form: Patches, axes: Axes) -> Size:
    channels = p.sizes[axes[3]] // math.prod(form.kernel) * form.groups
    folds = p.sizes[axes[1]] // max(math.prod(form.out_space), 1)
    return channels * folds * math.prod(form.space)


class GroupedConv(Method):
    """Per-sample weight gradient with the samples as groups: one `convolution_backward` with groups = B·G.

    Rochette, Manoel, Tramel 2019, arXiv:1912.06015.  flops = 2·B·T·G·I·O.  Rate: falls with small output planes.
    """

    name = "grouped-conv"
    own_op = True

    def applies(self, p: Pair) -> bool:
        return is_gradient(p) and split(p)[1][0] in p.out

    def out(self, p: Pair) -> Axes:
        _, (b, _, g, i), _ = split(p)
        return (b, g, other_axis(p), i)

    def work(self, p: Pair) -> Work:
        return _convolution_work(p)

    def seconds(self, p: Pair, device: Device) -> float:
        form, _, _ = split(p)
        small = not form.out_space or form.out_space[-1] <= 2
        rate = device.extra["grouped_conv_small_output" if small else "grouped_conv_output"]
        return _convolution_seconds(p, device, groups=True) + float(p.count(p.out)) * rate

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        form, x, grad = operands(p, a, b)
        n, folds, channels = x.shape[:3]
        x = x.transpose(0, 1).reshape(folds, n * channels, *form.space)
        outputs = grad.shape[2]
        grad = grad.reshape(n * form.groups * outputs, folds, *form.out_space).transpose(0, 1)
        window = [list(sizes) for sizes in (form.kernel, form.stride, form.padding, form.dilation)]
        found = grouped_weight_gradient(grad, x, n * form.groups, *window)
        return found.reshape(n, form.groups, outputs, -1)


def _convolution_seconds(p: Pair, device: Device, groups: bool) -> float:
    """Kernels compute blocks of 16 channels in and out. With groups, what is left over is slow, and depthwise
    ones have fast kernels for small windows alone (oneDNN; bench/convolutions.py).
    """
    form, axes, _ = split(p)
    inputs, outputs = p.sizes[axes[3]] // math.prod(form.kernel), p.sizes[other_axis(p)]
    if inputs == outputs == 1 and groups:
        slower = 16.0 if max(form.kernel) <= 3 else 53.0
    else:
        slower = (-inputs % 16 + inputs) * (-outputs % 16 + outputs) / (inputs * outputs)
        if groups and inputs >= 8:
            slower *= 4.0 if outputs % 8 else 1.5 if inputs % 16 or outputs % 16 else 1.0
    work = _convolution_work(p)
    return device.seconds(replace(work, flops=work.flops * slower), p.dtype) + device.extra["convolution"]


class ConvWeight(Method):
    """The ordinary weight gradient, samples summed: `convolution_backward` as in any training step."""

    name = "conv-weight"

    def applies(self, p: Pair) -> bool:
        return is_gradient(p) and split(p)[1][0] not in p.out

    def out(self, p: Pair) -> Axes:
        _, (_, _, g, i), _ = split(p)
        return (g, other_axis(p), i)

    def work(self, p: Pair) -> Work:
        return _convolution_work(p)

    def seconds(self, p: Pair, device: Device) -> float:
        """What threads have added up is brought into the order of the result element by element."""
        written = float(p.count(p.out)) * device.extra.get("conv_output", 0.0)
        return _convolution_seconds(p, device, groups=split(p)[0].groups > 1) + written

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        form, x, grad = operands(p, a, b)
        n, folds, channels = x.shape[:3]
        x = x.reshape(n * folds, channels, *form.space)
        outputs = grad.shape[2]
        grad = grad.reshape(n, form.groups * outputs, folds, *form.out_space).transpose(1, 2)
        grad = grad.reshape(n * folds, form.groups * outputs, *form.out_space)
        window = [list(sizes) for sizes in (form.kernel, form.stride, form.padding, form.dilation)]
        return weight_gradient(grad, x, form.groups, *window).reshape(form.groups, outputs, -1)


class Shifted(Method):
    """Per-sample weight gradient, one kernel offset at a time, on shifted slices of x: no K-fold copy of x."""

    name = "shifted"

    def applies(self, p: Pair) -> bool:
        if not is_gradient(p) or split(p)[1][0] not in p.out:
            return False
        return math.prod(split(p)[0].kernel) <= 49

    def out(self, p: Pair) -> Axes:
        return GroupedConv().out(p)

    def work(self, p: Pair) -> Work:
        form, axes, other = split(p)
        offsets = math.prod(form.kernel)
        base = _convolution_work(p, "bmm")
        read = offsets * (2 * p.count(axes) // offsets * p.dtype.itemsize + p.bytes(other.axes))
        return Work(base.flops, read, base.written, "bmm", 2 * offsets)

    def seconds(self, p: Pair, device: Device) -> float:
        """The products of all offsets are written one by one, then brought side by side."""
        out = p.bytes(p.out)
        return device.seconds(self.work(p), p.dtype) + device.seconds(Work(0, out, out))

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        form, x, grad = operands(p, a, b)
        n, folds, channels = x.shape[:3]
        per_group = channels // form.groups
        found = []
        for view in shifted_views(x, form):
            rows = view.reshape(n, folds, form.groups, per_group, -1).permute(0, 2, 3, 1, 4)
            rows = rows.reshape(n, form.groups, per_group, -1)
            found.append(torch.matmul(grad, rows.transpose(-1, -2)))
        return torch.stack(found, -1).reshape(n, form.groups, grad.shape[2], -1)


class WindowSum(Method):
    """Weight gradient at stride 1, or of one position, as one multiply and reduce over overlapping windows of x:
    nothing is copied.

    The way of depthwise convolutions, whose matrix products have a single row.  The samples are kept or summed.
    """

    name = "windows"

    def applies(self, p: Pair) -> bool:
        return is_gradient(p) and (set(split(p)[0].stride) == {1} or math.prod(split(p)[0].out_space) == 1)

    def out(self, p: Pair) -> Axes:
        _, (b, _, g, i), _ = split(p)
        return (*((b,) if b in p.out else ()), g, other_axis(p), i)

    def work(self, p: Pair) -> Work:
        return _convolution_work(p, "reduce")

    def seconds(self, p: Pair, device: Device) -> float:
        work, (form, _, _) = self.work(p), split(p)
        if form.out_space[-1] <= 8:  # a row shorter than a vector is computed element by element
            work = replace(work, flops=3 * work.flops)
        return device.seconds(device.fetching(work), p.dtype)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        form, x, grad = operands(p, a, b)
        dtype, nd = accumulation_dtype(p.dtype), len(form.kernel)
        rows = windows(x, form).unsqueeze(2)  # [b, g, 1, c, *kernel, f, *out_space]
        n, groups, outputs = grad.shape[:3]
        grad = grad.reshape(n, groups, outputs, *[1] * (1 + nd), *rows.shape[4 + nd :])
        positions = list(range(4 + nd, rows.ndim))
        kept, lead = ([], [n]) if split(p)[1][0] in p.out else ([0], [])
        return (rows.to(dtype) * grad.to(dtype)).sum(kept + positions).reshape(*lead, groups, outputs, -1)


def shifted_views(x: torch.Tensor, form: Patches) -> list[torch.Tensor]:
    """For each kernel offset (row-major) the part of padded x[b, f, c, *space] it meets, `[b, f, c, *out_space]`."""
    padded = _padded(x, form)
    found = []
    for offset in itertools.product(*(range(k) for k in form.kernel)):
        view = padded
        for axis, k in enumerate(offset):
            view = met(view, 3 + axis, form, axis, k)
        found.append(view)
    return found


def met(x: torch.Tensor, dim: int, form: Patches, axis: int, k: int) -> torch.Tensor:
    """The positions along `dim`, a padded spatial axis of x, that offset `k` of the kernel meets."""
    start, stride, count = k * form.dilation[axis], form.stride[axis], form.out_space[axis]
    view = x.narrow(dim, start, (count - 1) * stride + 1)
    return view if stride == 1 else view[(slice(None),) * dim + (slice(None, None, stride),)]


def _padded(x: torch.Tensor, form: Patches) -> torch.Tensor:
    return F.pad(x, [side for pad in reversed(form.padding) for side in (pad, pad)]) if any(form.padding) else x


def windows(x: torch.Tensor, form: Patches) -> torch.Tensor:
    """The patches as an overlapping view of padded x: `[b, g, c, *kernel, f, *out_space]`."""
    view = _padded(x, form)
    nd = len(form.kernel)
    for axis, (k, stride, dilation, count) in enumerate(
        zip(form.kernel, form.stride, form.dilation, form.out_space, strict=True)
    ):
        reach = (k - 1) * dilation + 1
        view = view.narrow(3 + axis, 0, (count - 1) * stride + reach).unfold(3 + axis, reach, stride)
        if dilation > 1:
            view = view[..., ::dilation]
    n, folds, channels = view.shape[:3]
    split = view.reshape(n, folds, form.groups, channels // form.groups, *view.shape[3:])
    space, kernel = range(4, 4 + nd), range(4 + nd, 4 + 2 * nd)
    return split.permute(0, 2, 3, *kernel, 1, *space)


def densify(x: torch.Tensor, form: Patches) -> torch.Tensor:
    """The patches as a tensor `[b, t, g, i]` in memory order (b, g, i, t)."""
    rows = windows(x, form)
    n, groups, channels = rows.shape[:3]
    t = x.shape[1] * math.prod(form.out_space)
    return rows.reshape(n, groups, channels * math.prod(form.kernel), t).permute(0, 3, 1, 2)
