"""`psg_fx::gram_dots` and `gram_dots_here`: the inner product of two Gram matrices, neither of which is ever in memory.

    G[n, t, t'] = Σ_i x[n, t, i] x[n, t', i],    H[n, t, t'] = Σ_o y[n, t, o] y[n, t', o]
    sums[0, n, k] = Σ_{(t, t') in tile k} G H,   sums[1, n, k] = Σ_{(t, t) in tile k} √(G H)

Both matrices are symmetric: tiles above the diagonal are not computed, those below count twice.  In half precision it
is a kernel of Triton on a CUDA device (`gram_kernels.py`), which inductor takes into its graph; in float32
it is C++ on a CPU (`ops/cpp/gram_dots.cpp`), with all tiles of a sample added up; elsewhere plain torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import define_op, defined_later
from psg_fx.tensors import HALF, Size, has_rows
from psg_fx.torch_private.native import library, passed, threads

DTYPES = HALF
"""What the kernel of Triton multiplies.  In float32 it took twice what `bmm` does on an H100 (docs/design/gpu.md)."""

LIBRARY = "gram_dots"

SIDE = 64
"""Rows and columns of a tile."""


def tiles(positions: Size) -> Size:
    """How many tiles of a matrix of so many positions are computed."""
    blocks = -(-positions // SIDE)
    return blocks * (blocks + 1) // 2


def gram_dots(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Σ_{t,t'} G H of x[n, t, i] and y[n, t, o], both of a dtype of `DTYPES` or both of float32: [n], in float32."""
    found: torch.Tensor = _HERE(x, y)[0] if x.dtype is torch.float32 else _op()(x, y)[0].sum(1)
    return found


def gram_diagonals(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Σ_t √(G H)[n, t, t], the sum of ‖x[n, t]‖ ‖y[n, t]‖: [n], in float32."""
    found: torch.Tensor = _HERE(x, y)[1] if x.dtype is torch.float32 else _op()(x, y)[1].sum(1)
    return found


def _here(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    compiled = library(LIBRARY) if x.device.type == "cpu" else None
    if compiled is None:
        return _of_torch_here(x, y)
    x, y = (value if has_rows(value) else value.contiguous() for value in (x, y))
    sums = _fake_here(x, y)
    strides = (ctypes.c_int64 * 4)(*x.stride()[:2], *y.stride()[:2])
    compiled.gram_dots(*map(passed, (x, y, sums)), strides, *map(passed, (*x.shape, y.shape[2])), threads())
    return sums


def _fake_here(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((2, x.shape[0]))


def _of_torch_here(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _by_torch(x, y).sum(2)


_HERE = define_op("gram_dots_here(Tensor x, Tensor y) -> Tensor", _here, _fake_here, _of_torch_here, LIBRARY, has_rows)


@functools.cache
def _op() -> Callable[..., Any]:
    """Registered when it is first wanted: for that torch loads Triton, where it is."""
    made: Any = torch.library.triton_op("psg_fx::gram_dots", _dots, mutates_args=())
    made.register_fake(_fake)
    register_flop_formula([torch.ops.psg_fx.gram_dots])(_flops)
    op: Callable[..., Any] = made
    return op


defined_later(_op, "gram_dots")


def _dots(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cuda":
        return _by_torch(x, y)
    from psg_fx.ops.products import gram_kernels  # Triton is loaded where there is something to launch

    sums = _fake(x, y)
    gram_kernels.launch(x, y, sums, SIDE)
    return sums


def _fake(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((2, x.shape[0], tiles(x.shape[1])), dtype=torch.float32)


def _by_torch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = (torch.bmm(a, a.mT) for a in (x.float(), y.float()))
    down, across = torch.tril_indices(*[-(-x.shape[1] // SIDE)] * 2, device=x.device)
    sums = _in_tiles(one * other)[:, down, across] * torch.where(down == across, 1.0, 2.0)
    roots = torch.diag_embed((one * other).diagonal(0, 1, 2).sqrt())
    return torch.stack([sums, _in_tiles(roots)[:, down, across]])


def _in_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """[n, t, t] -> the sums of its tiles."""
    blocks = -(-matrix.shape[1] // SIDE)
    lacking = blocks * SIDE - matrix.shape[1]
    whole = F.pad(matrix, (0, lacking, 0, lacking))
    return whole.reshape(-1, blocks, SIDE, blocks, SIDE).sum((2, 4))


def _flops(x: Sequence[int], y: Sequence[int], *rest: Any, **shapes: Any) -> int:
    """2 · n·(i + o) for each entry of a computed tile, and 2 · n of its product."""
    entries: int = tiles(x[1]) * SIDE * SIDE
    return 2 * x[0] * entries * (x[2] + y[2] + 1)


@register_flop_formula(torch.ops.psg_fx.gram_dots_here)
def _flops_here(x: Sequence[int], y: Sequence[int], *rest: Any, **shapes: Any) -> int:
    """The same for squares of 4 x 4."""
    squares = -(-x[1] // 4)
    entries: int = 16 * squares * (squares + 1) // 2
    return 2 * x[0] * entries * (x[2] + y[2] + 1)
