"""The kernel of `gram_products.py`.  Importing this loads Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton


@triton.jit  # type: ignore[untyped-decorator]
def gram_kernel(  # type: ignore[no-untyped-def]
    x, y, sums, positions, x_depth, y_depth, tiles,
    x_n, x_t, x_i, y_n, y_t, y_o,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, AS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One tile (r, c), c <= r, of one sample: both Gram matrices in float32, multiplied and summed; of a tile on the
    diagonal the roots of the products on it, too.

    A tile beside the diagonal counts twice, for the one on the other side.  Two numbers for each tile and no atomics,
    so that sums have one order.  AS_FLOAT32: as in `tile_kernel`.
    """
    program = tl.program_id(0)
    n, k = (program // tiles).to(tl.int64), program % tiles
    r = ((tl.sqrt(8.0 * k + 1.0) - 1.0) * 0.5).to(tl.int32)  # tiles come row by row: k = r(r+1)/2 + c
    r = tl.where((r + 1) * (r + 2) // 2 <= k, r + 1, tl.where(r * (r + 1) // 2 > k, r - 1, r))
    c = k - r * (r + 1) // 2
    down, across = r * SIDE + tl.arange(0, SIDE), c * SIDE + tl.arange(0, SIDE)
    one = _tile(x + n * x_n, x_t, x_i, down, across, positions, x_depth, SIDE, DEPTH, AS_FLOAT32)
    other = _tile(y + n * y_n, y_t, y_o, down, across, positions, y_depth, SIDE, DEPTH, AS_FLOAT32)
    products = one * other
    tl.store(sums + program, tl.sum(products) * tl.where(r == c, 1.0, 2.0))
    diagonal = tl.sqrt(tl.where(down[:, None] == across[None, :], products, 0.0))
    tl.store(sums + tl.num_programs(0) + program, tl.sum(diagonal))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    x, x_t, x_i, down, across, positions, depth,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, AS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Σ_i x[t, i] x[t', i] for t in `down` and t' in `across`; 0 beyond the last position."""
    i = tl.arange(0, DEPTH).to(tl.int64)
    left_at = x + down.to(tl.int64)[:, None] * x_t + i[None, :] * x_i
    right_at = x + i[:, None] * x_i + across.to(tl.int64)[None, :] * x_t
    found = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, depth, DEPTH):
        left = tl.load(left_at, (down[:, None] < positions) & (i[None, :] < depth - start), 0.0)
        right = tl.load(right_at, (i[:, None] < depth - start) & (across[None, :] < positions), 0.0)
        if AS_FLOAT32:
            left, right = left.to(tl.float32), right.to(tl.float32)
        found = tl.dot(left, right, found, input_precision="ieee")
        left_at += tl.full((), DEPTH, tl.int64) * x_i
        right_at += tl.full((), DEPTH, tl.int64) * x_i
    return found


def launch(x: torch.Tensor, y: torch.Tensor, sums: torch.Tensor, side: int) -> None:
    """Write `sums` [2, n, tiles] from x [n, t, i] and y [n, t, o]."""
    wrap_triton(gram_kernel)[grid(sums)](*arguments(x, y, sums), **meta(side))


def grid(sums: torch.Tensor) -> tuple[int]:
    """A program for each tile."""
    return (sums.shape[1] * sums.shape[2],)


def arguments(x: torch.Tensor, y: torch.Tensor, sums: torch.Tensor) -> list[Any]:
    """What the kernel is called with, in its order."""
    return [x, y, sums, x.shape[1], x.shape[2], y.shape[2], sums.shape[2], *x.stride(), *y.stride()]


def meta(side: int) -> dict[str, Any]:
    """What is compiled into the kernel, and how many warps work on a tile."""
    return {"SIDE": side, "DEPTH": 64, "AS_FLOAT32": False, "num_warps": 8 if side > 64 else 4, "num_stages": 3}
