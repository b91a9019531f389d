"""The kernel of `patch_products.py`.  Importing this loads Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from psg_fx.ops.products import tile_kernels
from psg_fx.ops.products.window import Window
from psg_fx.tensors import HALF


@triton.jit  # type: ignore[untyped-decorator]
def patch_kernel(  # type: ignore[no-untyped-def]
    y, x, product, squares, rows, columns, depth, groups, channels, high, wide, across_out,
    y_n, y_o, y_t, x_n, x_c, x_h, x_w, p_n, p_o, p_i,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    AS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One tile of one group of one sample: Σ_t y[n, o, t] patches(x)[n, t, i] in float32, its sum of squares, and if
    KEEP the tile itself, as `tile_kernel` does.  i = (c, kernel), t = (h, w) of the output; what a patch has of padding
    is zero.
    """
    down, across = tl.cdiv(rows, HEIGHT), tl.cdiv(columns, WIDTH)
    program = tl.program_id(0)
    n = (program // (down * across)).to(tl.int64)  # the offset of a sample may leave 32 bits
    o = (program % (down * across)) // across * HEIGHT + tl.arange(0, HEIGHT)
    i = program % across * WIDTH + tl.arange(0, WIDTH)
    t = tl.arange(0, DEPTH)
    i_h = i // KERNEL_W % KERNEL_H * DILATION_H - PADDING_H
    i_w = i % KERNEL_W * DILATION_W - PADDING_W
    x_at = x + n // groups * x_n + (n % groups * channels + i // (KERNEL_H * KERNEL_W)) * x_c
    y_at = y + n * y_n + o.to(tl.int64)[:, None] * y_o + t.to(tl.int64)[None, :] * y_t
    found = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(0, depth, DEPTH):
        left = tl.load(y_at, (o[:, None] < rows) & (t[None, :] < depth - start), 0.0)
        h = ((start + t) // across_out * STRIDE_H)[:, None] + i_h[None, :]
        w = ((start + t) % across_out * STRIDE_W)[:, None] + i_w[None, :]
        inside = (h >= 0) & (h < high) & (w >= 0) & (w < wide) & (t[:, None] < depth - start) & (i[None, :] < columns)
        right = tl.load(x_at[None, :] + h * x_h + w * x_w, inside, 0.0)
        if AS_FLOAT32:
            left, right = left.to(tl.float32), right.to(tl.float32)
        found = tl.dot(left, right, found, input_precision=PRECISION)
        y_at += tl.full((), DEPTH, tl.int64) * y_t
    if KEEP:
        kept = found.to(product.dtype.element_ty)
        p_at = product + n * p_n + o.to(tl.int64)[:, None] * p_o + i[None, :] * p_i
        tl.store(p_at, kept, (o[:, None] < rows) & (i[None, :] < columns))
        found = kept.to(tl.float32)
    tl.store(squares + program, tl.sum(found * found))


def launch(
    y: torch.Tensor, x: torch.Tensor, window: Window, product: torch.Tensor | None, squares: torch.Tensor,
    tile: tuple[int, int],
) -> None:  # fmt: skip
    """Write `squares` [n·g, tiles], and `product` [n·g, o, i] if there is one, of y [n·g, o, t], x [n, g·c, h, w]."""
    own = meta(y.dtype, window, tile, keep=product is not None)
    wrap_triton(patch_kernel)[tile_kernels.grid(squares)](*arguments(y, x, window, product, squares), **own)


def arguments(
    y: torch.Tensor, x: torch.Tensor, window: Window, product: torch.Tensor | None, squares: torch.Tensor
) -> list[Any]:
    """What the kernel is called with, in its order."""
    kept, strides = (squares, (0, 0, 0)) if product is None else (product, product.stride())
    channels, out = x.shape[1] // window.groups, window.out_space(x.shape[2:])
    sizes = [y.shape[1], channels * window.entries, y.shape[2], window.groups, channels, *x.shape[2:], out[1]]
    return [y, x, kept, squares, *sizes, *y.stride(), *x.stride(), *strides]


def meta(dtype: torch.dtype, window: Window, tile: tuple[int, int], keep: bool) -> dict[str, Any]:
    """What is compiled into the kernel, and how many warps work on a tile.

    In float32 no more than 16 positions are multiplied at a time: with 32 ptxas spills 8 or 16 bytes for some strides.
    """
    named = {"KERNEL": window.kernel, "STRIDE": window.stride, "PADDING": window.padding, "DILATION": window.dilation}
    sides = {f"{name}_{side}": size for name, sizes in named.items() for side, size in zip("HW", sizes, strict=True)}
    return tile_kernels.meta(dtype, tile, keep) | {"DEPTH": 32 if dtype in HALF else 16} | sides
