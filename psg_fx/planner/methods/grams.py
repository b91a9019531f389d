"""The inner product of two Gram matrices of positions, neither of them formed: kernels of psg_fx.

That of Triton is offered where `Device.fused` says so, that of C++ where `Device.compiled` does.  What was measured is
in docs/design/gpu.md and docs/design/cpu.md.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from psg_fx.algebra.network import BATCH, ROWS, Axes, Form, Unformed
from psg_fx.ops.products import gram_products
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods.base import Method, Pair, arrange, is_gram_of_rows
from psg_fx.tensors import Size
from psg_fx.torch_private import native

_OF_CUBLAS = 0.5
"""The share of `bmm`'s rate that the kernel reaches: 0.4 to 0.6 in bfloat16 on an H100, of tiles that are computed
(docs/design/gpu.md), where it has programs for all of the device.
"""

_STEP = 2.8e-7
"""Seconds in which a program multiplies 64 elements of each row, however few programs there are: 15 µs for 60 such
steps on an H100.
"""

_DEPTH = 64

_OF_TILES = 0.88
"""The rate of the kernel in C++ in that of products in tiles (docs/design/cpu.md)."""

_OF_A_SQUARE = 3000
"""What a square of 4×4 of both matrices takes beside its products, most of it to add up vectors, in flops."""


class NotFormed(Method):
    """G[b,t,t'] = Σ_i x[b,t,i] x[b,t',i], left to who reads it: the result is x."""

    name = "unformed"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = gram_products.DTYPES

    def applies(self, p: Pair) -> bool:
        return is_gram_of_rows(p) and p.a.dtype in self.dtypes

    def out(self, p: Pair) -> Axes:
        return (*p.batch, *p.left, *p.right)

    def form(self, p: Pair) -> Form:
        return Unformed(int(p.count(p.summed)), p.a.dtype)

    def bytes(self, p: Pair) -> Size:
        return 0

    def work(self, p: Pair) -> Work:
        return Work(0, 0, 0, calls=0)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return arrange(a, p.a.axes, (p.batch, p.left, p.summed))


def _forms(p: Pair) -> tuple[Unformed, Unformed]:
    """Those of both operands."""
    one, two = p.a.form, p.b.form
    assert isinstance(one, Unformed)
    assert isinstance(two, Unformed)
    return one, two


class GramDot(Method):
    """Σ_{t,t'} G[b,t,t'] H[b,t,t'], of which tiles lie in registers: those on the diagonal and below it.

    flops = 2 · b·(i+o) for each entry of such a tile; bytes = operands, and two numbers for each tile.
    """

    name = "gram-dot"
    own_op = True

    def applies(self, p: Pair) -> bool:
        if not (isinstance(p.a.form, Unformed) and isinstance(p.b.form, Unformed)):
            return False
        return set(p.a.axes) == set(p.b.axes) and p.out == (BATCH,)

    def out(self, p: Pair) -> Axes:
        return p.out

    def work(self, p: Pair) -> Work:
        samples, positions = p.count(p.out), p.sizes[p.a.axes[-1]]
        entries = samples * gram_products.tiles(positions) * gram_products.SIDE**2
        read = samples * positions * sum(form.depth * form.rows.itemsize for form in _forms(p))
        return Work(2 * entries * sum(form.depth for form in _forms(p)), read, 4 * samples, "bmm", 2)

    def seconds(self, p: Pair, device: Device) -> float:
        work, (one, two) = self.work(p), _forms(p)
        rate = device.rate("bmm", one.rows)
        compute = max(float(work.flops) / (_OF_CUBLAS * rate), _STEP * (one.depth + two.depth) / _DEPTH)
        return device.bounded(compute, work)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return gram_products.gram_dots(a, b)


class NotFormedHere(NotFormed):
    """The same for the kernel in C++; the rows of a sample are as many at every call."""

    dtypes = (torch.float32,)
    devices = ("cpu",)

    def applies(self, p: Pair) -> bool:
        return super().applies(p) and ROWS not in p.left + p.right


class GramDotHere(GramDot):
    """The same in C++, in squares of 4×4 (tiles of 3×4 with AVX2 come to as much, but for a few percent):
    flops = 2 · b·(i+o) for each entry of one on the diagonal or below it.
    """

    devices = ("cpu",)

    def work(self, p: Pair) -> Work:
        samples, read = p.count(p.out), super().work(p).read
        return Work(32 * self._squares(p) * sum(form.depth for form in _forms(p)), read, 8 * samples, "tile")

    def seconds(self, p: Pair, device: Device) -> float:
        flops = self.work(p).flops + _OF_A_SQUARE * self._squares(p)
        return float(flops) / (_OF_TILES * device.rate("tile")) + device.extra.get("product", 0.0) + device.launch

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        native.begin(gram_products.LIBRARY)
        return super().emit(p, a, b)

    def _squares(self, p: Pair) -> Size:
        along = (p.sizes[p.a.axes[-1]] + 3) // 4
        return p.count(p.out) * along * (along + 1) // 2
