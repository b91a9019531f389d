"""Per-sample products whose squared norm is taken while a tile of them lies in registers: kernels of psg_fx.

Those of Triton are offered where `Device.fused` says so, those of C++ where `Device.compiled` does.  What was measured
is in docs/design/gpu.md and docs/design/cpu.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from psg_fx.algebra.network import BATCH, Axes, Form, TileSums, WithTileSums, has_primed, paired
from psg_fx.ops.products import products_here, tile_products
from psg_fx.planner.cost import BEYOND_CACHES, Device, Work
from psg_fx.planner.methods.base import Method, Pair
from psg_fx.planner.methods.dense import MatMul
from psg_fx.tensors import Size, reshape
from psg_fx.torch_private import native

OF_CUBLAS = 0.7
"""The share of `bmm`'s rate that the kernels are taken to reach.  Not measured: it is the lowest of what was reported
for the float32 product of Triton's tutorial on an A100, 0.70 to 0.98 of cuBLAS for 256 to 2048 rows (Triton's issue
tracker, November 2023); half precision is taken for the same.
"""

_TALL, _PANEL = 8, 32
"""Rows and columns of their tiles."""

TILE = 64 * 64
"""About the elements of a tile."""


class TileSquares(Method):
    """Σ p², p[b,l,r] = Σ_s a[b,l,s] b[b,s,r], tile by tile; p is never in memory.

    flops = 2 · b·l·r·s of the product, with l and r in whole tiles, and 2 · b·l·r; bytes = operands, and a number for
    each tile.
    """

    name = "tile-squares"
    own_op = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tile_products.DTYPES
    _product = MatMul()

    def applies(self, p: Pair) -> bool:
        if not self._product.applies(p) or BATCH not in p.batch or has_primed(p.out):
            return False
        return p.a.dtype == p.b.dtype and p.dtype in self.dtypes

    def out(self, p: Pair) -> Axes:
        return self._product.out(p)

    def form(self, p: Pair) -> Form:
        return TileSums()

    def bytes(self, p: Pair) -> Size:
        return p.count(p.out) // TILE * 4 + 4 * p.count(p.batch)

    def work(self, p: Pair) -> Work:
        return Work(2 * p.count(p.everything) + 2 * p.count(p.out), p.moved()[0], p.count(p.out) * 4 / TILE, "bmm")

    def seconds(self, p: Pair, device: Device) -> float:
        work, (rows, columns) = self.work(p), self._product.sides(p)
        height, width = tile_products.tile(rows, columns)
        down, across = tile_products.tiles(rows, columns)
        computed = float(down * height * across * width) / max(rows * columns, 1)
        return device.bounded(computed * float(work.flops) / (OF_CUBLAS * device.rate(work.kind, p.dtype)), work)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = self._product.operands(p, a, b)
        return self._of_samples(p, tile_products.tile_squares(left, right), a)

    def _of_samples(self, p: Pair, squares: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """[n, tiles] as [b, tiles]: other axes that both operands have (groups) are summed over, too."""
        batch = [x for x in p.batch if x != BATCH]
        if not batch:
            return squares
        sizes = [a.shape[p.a.axes.index(x)] for x in p.batch]
        whole = reshape(squares, (*sizes, squares.shape[1])).movedim(p.batch.index(BATCH), 0)
        return whole.flatten(1)


class TileProduct(TileSquares):
    """p itself, too: what is read again (by a clipped sum) is not read for its norm."""

    name = "tile-matmul"

    def form(self, p: Pair) -> Form:
        return WithTileSums()

    def bytes(self, p: Pair) -> Size:
        return p.bytes(p.out, self.dtype(p))

    def work(self, p: Pair) -> Work:
        work = super().work(p)
        return Work(work.flops, work.read, work.written + self.bytes(p), work.kind)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        left, right = self._product.operands(p, a, b)
        product, squares = tile_products.tile_product(left, right, self.dtype(p))
        return self._product.shaped(p, product, a, b), self._of_samples(p, squares, a)


class RoundedTileProduct(TileProduct):
    """p in bfloat16, and Σ p² of what is kept."""

    name = "tile-matmul-bf16"

    def applies(self, p: Pair) -> bool:
        return super().applies(p) and p.dtype is torch.float32

    def dtype(self, p: Pair) -> torch.dtype:
        return torch.bfloat16


class _Here(TileSquares):
    """In C++ on a CPU, where all tiles of a sample are added up.  Not for products with Gram matrices, which are read
    place by place and not as a whole.
    """

    devices = ("cpu",)
    dtypes = (torch.float32,)

    def applies(self, p: Pair) -> bool:
        return super().applies(p) and not paired(p.a.axes) and not paired(p.b.axes)

    def work(self, p: Pair) -> Work:
        return replace(super().work(p), kind="tile")

    def seconds(self, p: Pair, device: Device) -> float:
        work, (rows, columns) = self.work(p), self._product.sides(p)
        computed = _whole(rows, _TALL) * _whole(columns, _PANEL) / max(rows * columns, 1)
        packed = p.count(p.everything) / max(rows, 1) * 4  # the second operand
        compute = float(computed * work.flops) / device.rate("tile") + float(packed) / device.bandwidth
        return device.bounded(compute, work) + device.extra.get("product", 0.0)


def _whole(size: Size, tile: int) -> Size:
    """The size in whole tiles."""
    return -(-size // tile) * tile


class _Outer(MatMul):
    """Also where nothing is summed."""

    def applies(self, p: Pair) -> bool:
        outer = p.a.dense and p.b.dense and p.left and p.right and not p.summed
        return super().applies(p) or bool(outer and p.bytes(p.out) >= BEYOND_CACHES)


class TileSquaresHere(_Here):
    """Σ p² in C++."""

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = self._product.operands(p, a, b)
        native.begin(products_here.LIBRARY)
        return self._of_samples(p, products_here.squares(left.mT, right)[:, None], a)


class TileProductHere(_Here, TileProduct):
    """p and Σ p² in C++; also of a single position, where no cache holds p: it is written past them."""

    _product = _Outer()

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        left, right = self._product.operands(p, a, b)
        native.begin(products_here.LIBRARY)
        product, squares = products_here.products(left.mT, right, rounded=self.dtype(p) is torch.bfloat16)
        return self._product.shaped(p, product, a, b), self._of_samples(p, squares[:, None], a)


class RoundedProductHere(TileProductHere, RoundedTileProduct):
    """The same in C++."""


class SumTiles(Method):
    """‖p[b]‖², the sum over the tiles of p."""

    name = "tile-sum"

    def applies(self, p: Pair) -> bool:
        return p.same and isinstance(p.a.form, (TileSums, WithTileSums)) and p.out == (BATCH,)

    def out(self, p: Pair) -> Axes:
        return p.out

    def work(self, p: Pair) -> Work:
        entries = p.count(p.a.axes) / TILE
        return Work(0, 4 * entries, p.count(p.out) * 4)

    def emit(self, p: Pair, a: Any, b: Any) -> torch.Tensor:
        squares: torch.Tensor = a[1] if isinstance(a, tuple) else a
        return squares.sum(1)
