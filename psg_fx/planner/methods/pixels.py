"""The Gram matrix of patches from that of pixels: kernel offsets are shifts, not further rows of a matrix product."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F

from psg_fx.algebra.network import Axes, Patches
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods.base import Arg, Method, Pair
from psg_fx.planner.methods.patches import met
from psg_fx.tensors import Size, accumulation_dtype


class PixelGram(Method):
    """Σ_i patches(x)[b,t,g,i] patches(x')[b,t',g,i] = Σ_k P[b,g, t+k, t'+k], P = Σ_c x[b,g,c,·] x'[b,g,c,·].

    One matrix product over channels alone; then the sum over kernel offsets k, one spatial axis after the other, of
    shifted views of P.  t and t' are kept; g is kept or summed; the samples are shared, or each operand has its own.
    """

    name = "pixel-gram"

    def applies(self, p: Pair) -> bool:
        one, two = p.a.form, p.b.form
        if not (isinstance(one, Patches) and isinstance(two, Patches)):
            return False
        (b, t, g, i), (b2, t2, g2, i2) = p.a.axes, p.b.axes
        return (
            one.kernel == two.kernel and set(one.stride + two.stride) == {1} and (g, i) == (g2, i2)
            and i not in p.out and t != t2 and {b, b2, t, t2} <= set(p.out)
        )  # fmt: skip

    def out(self, p: Pair) -> Axes:
        (b, t, g, _), (b2, t2, _, _) = p.a.axes, p.b.axes
        groups = (g,) if g in p.out else ()
        return (b, *groups, t, t2) if b == b2 else (*groups, b, t, b2, t2)

    def work(self, p: Pair) -> Work:
        product = self._product(p)
        added = self._added(p)
        return Work(product.flops + added.flops, product.read + added.read, product.written + added.written, "bmm", 3)

    def seconds(self, p: Pair, device: Device) -> float:
        return device.seconds(self._product(p), p.dtype) + device.seconds(self._added(p), p.dtype)

    def _product(self, p: Pair) -> Work:
        """P, the Gram matrix of pixels."""
        one, two = _pixels(p, p.a), _pixels(p, p.b)
        samples = p.count(tuple({p.a.axes[0], p.b.axes[0]}))
        groups, channels = p.sizes[p.a.axes[2]], _channels(p)
        size = p.dtype.itemsize
        read = groups * channels * size * (p.sizes[p.a.axes[0]] * one + p.sizes[p.b.axes[0]] * two)
        matrices = samples * (groups if p.a.axes[2] in p.out else 1) * one * two
        return Work(2 * samples * groups * channels * one * two, read, matrices * size, "bmm")

    def _added(self, p: Pair) -> Work:
        """The sums over offsets: each spatial axis reads and writes about one matrix for each of its offsets."""
        matrix, out = self._product(p).written, p.bytes(self.out(p))
        shifts = sum(k for k in _form(p.a).kernel if k > 1)
        return Work(p.count(self.out(p)) * shifts, matrix, out, "pointwise", 2)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        one, two = _form(p.a), _form(p.b)
        dtype = accumulation_dtype(p.dtype)  # a Gram matrix: its entries are multiplied again, keep full precision
        left, right = (_planes(p, arg, x.to(dtype)) for arg, x in ((p.a, a), (p.b, b)))
        found = torch.matmul(left.flatten(3).transpose(2, 3), right.flatten(3))
        found = found.reshape(*left.shape[:2], *left.shape[3:], *right.shape[3:])
        nd = len(one.kernel)
        first, second = left.ndim - 1 - nd, found.ndim - nd  # the dims of the first spatial axis
        found = _padded(found, {first: one.padding, second: two.padding})
        for axis in range(nd - 1, -1, -1):
            views = (
                met(met(found, first + axis, one, axis, k), second + axis, two, axis, k)
                for k in range(one.kernel[axis])
            )
            found = reduce(add, views)
        sizes = [_size(x, p, a, b) for x in self.out(p)]
        return found.reshape(sizes)


def _form(arg: Arg) -> Patches:
    assert isinstance(arg.form, Patches)
    return arg.form


def _planes(p: Pair, arg: Arg, x: torch.Tensor) -> torch.Tensor:
    """x[b, f, g·c, *space] as `[b, g, c, f, *space]`; `[1, g, c, b, f, *space]` where operands have own samples."""
    groups = _form(arg).groups if arg.axes[2] in p.out else 1
    n, folds, channels, *space = x.shape
    split = x.reshape(n, folds, groups, channels // groups, *space)
    if p.a.axes[0] == p.b.axes[0]:
        return split.movedim(1, 3)
    return split.permute(2, 3, 0, 1, *range(4, split.ndim)).unsqueeze(0)


def _padded(x: torch.Tensor, padding: dict[int, tuple[int, ...]]) -> torch.Tensor:
    """Zeros on both sides of dims; `padding` has the widths of consecutive dims by the first of them."""
    widths = [0] * x.ndim
    for dim, found in padding.items():
        widths[dim : dim + len(found)] = found
    return F.pad(x, [side for width in reversed(widths) for side in (width, width)]) if any(widths) else x


def _channels(p: Pair) -> Size:
    return p.sizes[p.a.axes[3]] // math.prod(_form(p.a).kernel)


def _pixels(p: Pair, arg: Arg) -> Size:
    """Folds and positions of the stored planes of one sample."""
    form = _form(arg)
    return p.sizes[arg.axes[1]] // max(math.prod(form.out_space), 1) * math.prod(form.space)


def _size(axis: str, p: Pair, a: torch.Tensor, b: torch.Tensor) -> int:
    """The size of an axis of the result, as it is in the tensors."""
    arg, x = (p.a, a) if axis in p.a.axes else (p.b, b)
    form = _form(arg)
    sizes = (x.shape[0], x.shape[1] * math.prod(form.out_space), form.groups)
    return sizes[arg.axes.index(axis)]
