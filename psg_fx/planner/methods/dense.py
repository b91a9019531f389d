"""Contractions of plain tensors: outer product, dot, matrix product."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from psg_fx.algebra.network import BATCH, Axes, has_primed, paired
from psg_fx.ops.products.rounded import rounded
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods.base import Method, Pair, arrange, expand_to
from psg_fx.tensors import ALIGNED, HALF, Size, accumulation_dtype, hint, memory_order, product, reshape


class Multiply(Method):
    """out[..] = a[..] b[..], broadcast: nothing is summed over both operands (T = 1 outer products, weights).

    flops = product of all axes.
    """

    name = "multiply"

    def applies(self, p: Pair) -> bool:
        return p.a.dense and p.b.dense and all(x in p.out or p.sizes[x] == 1 for x in p.everything)

    def out(self, p: Pair) -> Axes:
        return p.out if p.left and p.right else tuple(x for x in p.everything if x in p.out)

    def work(self, p: Pair) -> Work:
        read, written = p.moved()
        return Work(p.count(p.everything), read, written)

    def seconds(self, p: Pair, device: Device) -> float:
        return device.seconds(device.fetching(self.work(p)), p.dtype)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = self.out(p)
        a, b = expand_to(a, p.a.axes, out), expand_to(b, p.b.axes, out)
        if p.same or has_primed(p.everything):  # squares of half precision leave its range
            a, b = a.to(accumulation_dtype(p.dtype)), b.to(accumulation_dtype(p.dtype))
        return a.square() if p.same else a * b


class Dot(Method):
    """out[k] = Σ_s a[k,s] b[k,s]: multiply and reduce in one pass, nothing stored between.

    flops = 2 · product of all axes; bytes = both operands once.
    """

    name = "dot"
    widens = True

    def applies(self, p: Pair) -> bool:
        return p.a.dense and p.b.dense and not (p.summed and p.left and p.right) and not Multiply().applies(p)

    def out(self, p: Pair) -> Axes:
        return tuple(x for x in p.everything if x in p.out)

    def work(self, p: Pair) -> Work:
        read, written = p.moved()
        return Work(2 * p.count(p.everything), read, written)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = accumulation_dtype(p.dtype)
        axes = tuple(x for x in p.everything if x in p.out or p.sizes[x] != 1)
        a = expand_to(a, p.a.axes, axes).to(dtype)
        both = a.square() if p.same else a * expand_to(b, p.b.axes, axes).to(dtype)
        return both.sum([i for i, x in enumerate(axes) if x not in p.out])


class MatMul(Method):
    """out[k,l,r] = Σ_s a[k,l,s] b[k,s,r]: one (batched) matrix product.

    flops = 2 · k·l·r·s; bytes = operands and result once.
    """

    name = "matmul"

    def applies(self, p: Pair) -> bool:
        return p.a.dense and p.b.dense and bool(p.summed and p.left and p.right)

    def out(self, p: Pair) -> Axes:
        ones = tuple(x for x in p.out if p.sizes[x] == 1)
        first, second = (p.right, p.left) if self._swapped(p) else (p.left, p.right)
        return p.batch + first + second + ones

    def _swapped(self, p: Pair) -> bool:
        """Whether `b`'s axes come first in the result."""
        return p.out.index(p.right[0]) < p.out.index(p.left[0])

    def work(self, p: Pair) -> Work:
        read, written = p.moved()
        if not p.batch:
            return Work(2 * p.count(p.everything), read, written, "gemm")
        return Work(2 * p.count(p.everything), read, written, "bmm", results=p.count(p.out))

    def seconds(self, p: Pair, device: Device) -> float:
        work = self.work(p)
        if device.name == "cuda" and p.self_product and p.dtype in HALF and p.count(p.right) % ALIGNED:
            copied = p.bytes(p.b.axes)  # an operand with whole multiples of columns (`passes/widen.py`)
            work = replace(work, read=work.read + copied, written=work.written + copied, calls=work.calls + 1)
        return device.seconds(device.fetching(work) if p.batch else work, p.dtype)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = self.operands(p, a, b)
        found = torch.bmm(left, right) if p.batch else torch.mm(left.squeeze(0), right.squeeze(0))
        return self.shaped(p, found, a, b)

    def sides(self, p: Pair) -> tuple[Size, Size]:
        """Rows and columns of the product of one sample."""
        left, right = p.count(p.left), p.count(p.right)
        return (right, left) if self._swapped(p) else (left, right)

    def operands(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as matrices, [k, rows, s] and [k, s, columns], in the dtype of the product."""
        a, b = _without_lonely(p, a, p.a.axes), _without_lonely(p, b, p.b.axes)
        dtype = torch.promote_types(a.dtype, b.dtype)
        if has_primed(p.everything):  # its entries are multiplied again, keep full precision and range
            dtype = accumulation_dtype(dtype)
        a, b = a.to(dtype), b.to(dtype)
        summed = self._order(p, a, b)
        if self._swapped(p):
            left = arrange(b, p.b.axes, (p.batch, p.right, summed))
            return left, arrange(a, p.a.axes, (p.batch, summed, p.left))
        left = arrange(a, p.a.axes, (p.batch, p.left, summed))
        return left, arrange(b, p.b.axes, (p.batch, summed, p.right))

    @staticmethod
    def _order(p: Pair, a: torch.Tensor, b: torch.Tensor) -> Axes:
        """The axes that are summed, in the order in which they lie in memory in the larger operand, which then need not
        be copied to have one in place of them (a recurrent layer has all samples of a step side by side).
        """
        of_a, of_b = (product(map(hint, tensor.shape)) for tensor in (a, b))
        larger, axes = (a, p.a.axes) if of_a > of_b else (b, p.b.axes)
        return tuple(axes[dim] for dim in memory_order(larger) if axes[dim] in p.summed)

    def shaped(self, p: Pair, found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product of `operands` with the axes `out`."""
        return reshape(found, [_size(x, a, p.a.axes, b, p.b.axes) for x in self.out(p)])


class RoundedMatMul(MatMul):
    """The gradient of each sample, rounded to bfloat16 as soon as it is there: each element is off by at most 2⁻⁸ of
    itself.

    flops = 2 · k·l·r·s; bytes = those of the product, which is read again, and half of it.
    """

    name = "matmul-bf16"
    own_op = True

    def applies(self, p: Pair) -> bool:
        return super().applies(p) and BATCH in p.batch and p.dtype is torch.float32 and not paired(p.out)

    def dtype(self, p: Pair) -> torch.dtype:
        return torch.bfloat16

    def work(self, p: Pair) -> Work:
        work, product = super().work(p), p.bytes(p.out)
        return Work(work.flops, work.read + product, work.written + self.bytes(p), work.kind, calls=2)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rounded(super().emit(p, a, b))
        return found


class SumOfOuter(Method):
    """out[k,l,r] = Σ_s a[k,l,s] b[k,s,r] of few s, written as a[k,l,s,1] b[k,1,s,r] summed over s.

    Inductor writes such a sum out as a few multiply-adds in the loops of what reads it, as it does an outer product:
    there is no call of a library, and need be no memory.  On a CPU such a call takes 3 µs by itself and 10 in a step,
    whose other loops have filled the caches.

    flops = 2 · k·l·r·s, at the rate of what is summed without being stored; no kernel of its own.  Not for Gram
    matrices and products with them, which other products read and not loops; nor over samples, of which the next call
    may have many.
    """

    name = "multiply-sum"
    devices = ("cpu",)
    _product = MatMul()

    def applies(self, p: Pair) -> bool:
        if not self._product.applies(p) or BATCH in p.summed or any(map(paired, (p.a.axes, p.b.axes, p.out))):
            return False
        places = p.count(p.summed)
        return isinstance(places, sympy.Expr) or places < _WRITTEN_OUT

    def out(self, p: Pair) -> Axes:
        return p.out

    def work(self, p: Pair) -> Work:
        read, written = p.moved()
        return Work(2 * p.count(p.everything), read, written, "reduce", calls=0)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = _without_lonely(p, a, p.a.axes), _without_lonely(p, b, p.b.axes)
        dtype = accumulation_dtype(p.dtype)
        axes = (*p.out, *p.summed)
        both = expand_to(a, p.a.axes, axes).to(dtype) * expand_to(b, p.b.axes, axes).to(dtype)
        return both.sum(list(range(len(p.out), len(axes)))).to(p.dtype)


_WRITTEN_OUT = 8
"""Sums of fewer terms are written out by inductor (`unroll_reductions_threshold`)."""


def _size(axis: str, a: torch.Tensor, a_axes: Axes, b: torch.Tensor, b_axes: Axes) -> int:
    return a.shape[a_axes.index(axis)] if axis in a_axes else b.shape[b_axes.index(axis)]


def _without_lonely(p: Pair, tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Sum the axes that only this operand has and nobody keeps (their dims stay, with size 1)."""
    other = p.b.axes if axes is p.a.axes else p.a.axes
    dims = [i for i, x in enumerate(axes) if x not in p.out and x not in other and p.sizes[x] != 1]
    return tensor.sum(dims, keepdim=True) if dims else tensor
