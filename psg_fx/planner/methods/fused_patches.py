"""Gradients for the weights of convolutions whose patches are never in memory: kernels of psg_fx (Triton).

Offered where `Device.fused` says so.  docs/design/gpu.md says what was compiled, executed and timed.
"""

from __future__ import annotations

import math

import torch

from psg_fx.algebra.network import BATCH, Axes
from psg_fx.ops.products import patch_products, tile_products
from psg_fx.ops.products.window import Window
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods.base import Pair
from psg_fx.planner.methods.fused import OF_CUBLAS, TILE, TileProduct, TileSquares
from psg_fx.planner.methods.patches import GroupedConv, is_gradient, operands, other_axis, split
from psg_fx.tensors import reshape

_OF_CUBLAS = {torch.float32: 0.18}
"""The share of `bmm`'s rate that they reach, half precision that of other tiles until it is timed.  On an H200 two of
them for SimpleCNN with 64 samples, 1.86 Gflop in whole tiles, take 0.223 ms, where `bmm` does 46 Tflop/s
(bench/results/kernels-cuda-nvidia-h200-simplecnn.md).
"""

_OF_AN_ENTRY = 24
"""What an entry of a patch costs that is read: the dozen integer operations of its address and its mask, of which a
multiprocessor does half as many as of float32 (CUDA C++ Programming Guide, arithmetic instructions, capability 9.0).
"""


class PatchSquares(TileSquares):
    """Σ p², p[b,g,o,i] = Σ_t ȳ[b,g,o,t] patches(x)[b,t,g,i], tile by tile, over images or lines; neither p nor the
    patches are ever in memory.

    flops = 2 · b·g·o·i·t of the product, with o and i in whole tiles, and 2 · b·g·o·i; entries are read once for each
    row of tiles; bytes = x and ȳ, and a number for each tile.
    """

    name = "patch-squares"

    def applies(self, p: Pair) -> bool:
        if not is_gradient(p) or p.a.dtype != p.b.dtype or p.dtype not in tile_products.DTYPES:
            return False
        form, (b, t, _, _), _ = split(p)
        return b == BATCH and b in p.out and len(form.kernel) <= 2 and p.sizes[t] == math.prod(form.out_space)

    def out(self, p: Pair) -> Axes:
        return GroupedConv().out(p)

    def work(self, p: Pair) -> Work:
        of_product = GroupedConv().work(p)
        return Work(of_product.flops + 2 * p.count(p.out), of_product.read, p.count(p.out) * 4 / TILE, "bmm")

    def seconds(self, p: Pair, device: Device) -> float:
        work, rows, columns = self.work(p), p.sizes[other_axis(p)], p.sizes[split(p)[1][3]]
        height, width = patch_products.tile_of(rows, columns, p.dtype)
        down, across = tile_products.tiles(rows, columns, (height, width))
        computed = float(down * height * across * width) / max(rows * columns, 1)
        rate = _OF_CUBLAS.get(p.dtype, OF_CUBLAS) * device.rate(work.kind, p.dtype)
        compute = computed * float(work.flops) / rate
        entries = float(p.count(split(p)[1]) * down) * width * across / max(columns, 1)
        compute += _OF_AN_ENTRY * entries / device.rate("pointwise", torch.float32)
        return device.bounded(compute, work)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, x, window = self._given(p, a, b)
        return self._of_samples(p, patch_products.patch_squares(y, x, window), x)

    def _given(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Window]:
        """ȳ[b·g, o, t], x[b, g·c, h, w], and how it is read; lines are images of one row."""
        form, x, y = operands(p, a, b)
        line = 2 - len(form.kernel)
        x = x.reshape(x.shape[0], x.shape[2], *[1] * line, *form.space)
        one, none = [1] * line, [0] * line
        window = Window(
            form.groups, [*one, *form.kernel], [*one, *form.stride], [*none, *form.padding], [*one, *form.dilation]
        )
        return y.flatten(0, 1), x, window

    def _of_samples(self, p: Pair, squares: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[b·g, tiles] as [b, tiles]: groups are summed over, too."""
        groups = split(p)[0].groups
        return reshape(squares, (x.shape[0], groups * squares.shape[1]))


class PatchProduct(TileProduct, PatchSquares):
    """p itself, too: what is read again (by a clipped sum) is not read for its norm."""

    name = "patch-matmul"

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y, x, window = self._given(p, a, b)
        product, squares = patch_products.patch_product(y, x, window)
        n, groups = x.shape[0], window.groups
        return product.reshape(n, groups, *product.shape[1:]), self._of_samples(p, squares, x)
