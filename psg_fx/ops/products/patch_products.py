"""`psg_fx::patch_squares` and `psg_fx::patch_product`: gradients of each sample for the weight of a convolution, and
the squares of their elements summed while a tile of them lies in registers.

    p[n, o, i] = Σ_t y[n, o, t] patches(x)[n, t, i];        squares[n, k] = Σ_{(o, i) in tile k} p[n, o, i]²

as `tile_products.py`, but patches are never in memory: their entries are read from the image.  On a CUDA
device they are kernels of Triton (`patch_kernels.py`), which inductor takes into its graph; elsewhere torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import defined_later
from psg_fx.ops.products import tile_products
from psg_fx.ops.products.window import Window
from psg_fx.tensors import HALF, Size, accumulation_dtype

Sizes = Sequence[int]


def patch_squares(y: Tensor, x: Tensor, window: Window) -> Tensor:
    """y[n·g, o, t], x[n, g·c, h, w] of one dtype of `tile_products.DTYPES` -> squares[n·g, tiles], in float32."""
    found: Tensor = _ops()[0](y, x, *window)
    return found


def patch_product(y: Tensor, x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The same, and before it the product [n·g, o, i]; the squares are those of the product as it is kept."""
    product, squares = _ops()[1](y, x, *window)
    return product, squares


def tile(y: Tensor, x: Tensor, window: Window) -> tuple[int, int]:
    """Rows and columns of a tile."""
    return tile_of(y.shape[1], _columns(x, window), y.dtype)


def tile_of(rows: Size, columns: Size, dtype: torch.dtype) -> tuple[int, int]:
    """The same for a product of this size: large ones in half precision alone, since addresses of patches take
    registers that large tiles of float32 do not have.
    """
    height, width = tile_products.tile(rows, columns)
    return (height, width) if dtype in HALF else (min(height, 64), min(width, 64))


def is_tiled(node: Node) -> bool:
    """Whether a node of a graph is one of both ops."""
    return str(node.target) in ("psg_fx.patch_squares.default", "psg_fx.patch_product.default")


@functools.cache
def _ops() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both ops, registered when they are first wanted: for that torch loads Triton, where it is."""
    squares: Any = torch.library.triton_op("psg_fx::patch_squares", _squares, mutates_args=())
    squares.register_fake(_squares_fake)
    product: Any = torch.library.triton_op("psg_fx::patch_product", _product, mutates_args=())
    product.register_fake(_product_fake)
    register_flop_formula([torch.ops.psg_fx.patch_squares, torch.ops.psg_fx.patch_product])(_flops)
    return squares, product


defined_later(_ops, "patch_squares", "patch_product")


def _squares(
    y: Tensor, x: Tensor, groups: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor:  # fmt: skip
    window = Window(groups, kernel, stride, padding, dilation)
    if y.device.type == "cuda":
        squares = _squares_fake(y, x, *window)
        _launch(y, x, window, None, squares)
        return squares
    dtype = accumulation_dtype(y.dtype)
    return tile_products.by_torch(y, window.patches(x.to(dtype)), dtype, tile(y, x, window))[1]


def _product(
    y: Tensor, x: Tensor, groups: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> tuple[Tensor, Tensor]:  # fmt: skip
    window = Window(groups, kernel, stride, padding, dilation)
    if y.device.type == "cuda":
        product, squares = _product_fake(y, x, *window)
        _launch(y, x, window, product, squares)
        return product, squares
    patches = window.patches(x.to(accumulation_dtype(y.dtype)))
    return tile_products.by_torch(y, patches, y.dtype, tile(y, x, window))


def _launch(y: Tensor, x: Tensor, window: Window, product: Tensor | None, squares: Tensor) -> None:
    from psg_fx.ops.products import patch_kernels  # Triton is loaded where there is something to launch

    patch_kernels.launch(y, x, window, product, squares, tile(y, x, window))


def _columns(x: Tensor, window: Window) -> int:
    return x.shape[1] // window.groups * window.entries


def _squares_fake(y: Tensor, x: Tensor, *window: Any) -> Tensor:
    down, across = tile_products.tiles(y.shape[1], _columns(x, Window(*window)), tile(y, x, Window(*window)))
    return y.new_empty((y.shape[0], down * across), dtype=accumulation_dtype(y.dtype))


def _product_fake(y: Tensor, x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    return y.new_empty((y.shape[0], y.shape[1], _columns(x, Window(*window)))), _squares_fake(y, x, *window)


def _flops(y: Sizes, x: Sizes, groups: int, kernel: Sizes, *rest: Any, **shapes: Any) -> int:
    """2 · n·g·o·t·i of the product, and 2 · n·g·o·i of the squares."""
    return 2 * y[0] * y[1] * (x[1] // groups) * math.prod(kernel) * (y[2] + 1)
