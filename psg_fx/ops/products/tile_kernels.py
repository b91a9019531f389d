"""The kernel of `tile_products.py`.  Importing this loads Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from psg_fx.tensors import HALF


@triton.jit  # type: ignore[untyped-decorator]
def tile_kernel(  # type: ignore[no-untyped-def]
    a, b, product, squares, rows, columns, depth,
    a_n, a_i, a_t, b_n, b_t, b_o, p_n, p_i, p_o,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    AS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One tile of one sample: Σ_t a[n, i, t] b[n, t, o] in float32, its sum of squares, and if KEEP the tile itself, as
    its dtype holds it; then the squares are those of what is held.

    One number for each tile and no atomics, so that the sum has one order.  AS_FLOAT32: operands are made float32
    before they are multiplied, for Triton's interpreter, which multiplies bfloat16 wrongly.
    """
    down, across = tl.cdiv(rows, HEIGHT), tl.cdiv(columns, WIDTH)
    program = tl.program_id(0)
    n = (program // (down * across)).to(tl.int64)  # the offset of a sample may leave 32 bits
    i = (program % (down * across)) // across * HEIGHT + tl.arange(0, HEIGHT)
    o = program % across * WIDTH + tl.arange(0, WIDTH)
    t = tl.arange(0, DEPTH).to(tl.int64)
    a_at = a + n * a_n + i.to(tl.int64)[:, None] * a_i + t[None, :] * a_t
    b_at = b + n * b_n + t[:, None] * b_t + o.to(tl.int64)[None, :] * b_o
    found = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(0, depth, DEPTH):
        left = tl.load(a_at, (i[:, None] < rows) & (t[None, :] < depth - start), 0.0)
        right = tl.load(b_at, (t[:, None] < depth - start) & (o[None, :] < columns), 0.0)
        if AS_FLOAT32:
            left, right = left.to(tl.float32), right.to(tl.float32)
        found = tl.dot(left, right, found, input_precision=PRECISION)
        a_at += tl.full((), DEPTH, tl.int64) * a_t
        b_at += tl.full((), DEPTH, tl.int64) * b_t
    if KEEP:
        kept = found.to(product.dtype.element_ty)
        p_at = product + n * p_n + i.to(tl.int64)[:, None] * p_i + o[None, :] * p_o
        tl.store(p_at, kept, (i[:, None] < rows) & (o[None, :] < columns))
        found = kept.to(tl.float32)
    tl.store(squares + program, tl.sum(found * found))


def launch(
    a: torch.Tensor, b: torch.Tensor, product: torch.Tensor | None, squares: torch.Tensor, tile: tuple[int, int]
) -> None:
    """Write `squares` [n, tiles], and `product` [n, i, o] if there is one, from a [n, i, t] and b [n, t, o]."""
    own = meta(a.dtype, tile, keep=product is not None, depth=a.shape[2])
    wrap_triton(tile_kernel)[grid(squares)](*arguments(a, b, product, squares), **own)


def grid(squares: torch.Tensor) -> tuple[int]:
    """A program for each tile."""
    return (squares.shape[0] * squares.shape[1],)


def arguments(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor | None, squares: torch.Tensor) -> list[Any]:
    """What the kernel is called with, in its order."""
    kept, strides = (squares, (0, 0, 0)) if product is None else (product, product.stride())
    return [a, b, kept, squares, a.shape[1], b.shape[2], a.shape[2], *a.stride(), *b.stride(), *strides]


def meta(dtype: torch.dtype, tile: tuple[int, int], keep: bool, depth: Any = None) -> dict[str, Any]:
    """What is compiled into the kernel, and how many warps work on a tile.

    depth: what is summed over, if it is a number.  Up to 16 (the least that `tl.dot` takes) no more is multiplied; for
    a few positions a step of 32 is mostly zeros, and takes registers that large tiles do not have.
    """
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    height, width = tile
    wide = height * width > 64 * 64
    step = 16 if isinstance(depth, int) and depth <= 16 else 64 if wide and dtype in HALF else 32
    return {
        "HEIGHT": height, "WIDTH": width, "DEPTH": step, "KEEP": keep,
        "PRECISION": "tf32" if tf32 else "ieee", "AS_FLOAT32": False,
        "num_warps": 8 if wide else 4, "num_stages": 3,
    }  # fmt: skip
