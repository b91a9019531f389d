"""The kernel of `weighted_sums.py`.  Importing this loads Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

AT_ONCE = 8
"""Tensors of a launch."""

_BYTES = 16
"""Of a row, read by a thread at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]
    weights, x, y, part, samples, width, LEAVE_OUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Columns of one sum, down all rows, with `ROWS` of them on their way."""
    i = part * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, samples, ROWS):
        for row in tl.static_range(ROWS):
            b = start + row
            weight = tl.load(weights + b, b < samples, 0.0).to(tl.float32)
            at = x + tl.full((), b, tl.int64) * width + i
            there = inside & (tl.full((BLOCK,), b, tl.int32) < samples)  # Triton 3.9 interprets `b < samples` wrongly
            added = weight * tl.load(at, there, 0.0).to(tl.float32)
            if LEAVE_OUT:
                added = tl.where(weight == 0.0, 0.0, added)
            found += added
    tl.store(y + i, found, inside)


@triton.jit  # type: ignore[untyped-decorator]
def weighted_sum_kernel(  # type: ignore[no-untyped-def]
    weights, x0, x1, x2, x3, x4, x5, x6, x7, y0, y1, y2, y3, y4, y5, y6, y7, samples, width,
    COUNT: tl.constexpr, LEAVE_OUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A part of one sum: y_k[i] = Σ_b w[b] x_k[b, i] in float32, b in order.  LEAVE_OUT: rows of weight 0 have no part.

    What is beyond COUNT is not in the compiled kernel, and each y is written through its own name: by that inductor
    knows what it has to keep.
    """
    k, part = tl.program_id(0) // tl.cdiv(width, BLOCK), tl.program_id(0) % tl.cdiv(width, BLOCK)
    xs, ys = (x0, x1, x2, x3, x4, x5, x6, x7), (y0, y1, y2, y3, y4, y5, y6, y7)
    for one in tl.static_range(COUNT):
        if k == one:
            _part(weights, xs[one], ys[one], part, samples, width, LEAVE_OUT, BLOCK, ROWS)


def launch(
    weights: torch.Tensor, values: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], leave_out: bool
) -> None:
    """Write sums [n] from weights [B] and values [B, n], all contiguous, of one dtype and one size."""
    own = meta(values[0].dtype, len(values), leave_out)
    wrap_triton(weighted_sum_kernel)[grid(values, own)](*arguments(weights, values, sums), **own)


def grid(values: Sequence[torch.Tensor], own: dict[str, Any]) -> tuple[Any]:
    """A program for each part of each sum."""
    return (-(-values[0].shape[1] // own["BLOCK"]) * len(values),)


def arguments(weights: torch.Tensor, values: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> list[Any]:
    """What the kernel is called with, in its order; in the places of tensors that there are not is one that it does not
    write, and that inductor has in memory.
    """
    none = [values[0]] * (AT_ONCE - len(values))
    return [weights, *values, *none, *sums, *none, *values[0].shape]


def meta(dtype: torch.dtype, count: int, leave_out: bool) -> dict[str, Any]:
    """What is compiled into the kernel, and how many warps run it: of eight ways the fastest for most of six
    problems on an H200 (bench/results/weighted_sums-cuda-nvidia-h200.md).
    """
    threads = 128
    return {
        "COUNT": count, "LEAVE_OUT": leave_out, "BLOCK": threads * _BYTES // dtype.itemsize,
        "ROWS": 16 // dtype.itemsize, "num_warps": threads // 32, "num_stages": 2,
    }  # fmt: skip
