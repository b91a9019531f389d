"""The kernels of `psg_fx/ops/recurrent_cells.py`.  Importing this loads Triton.

Each takes whole steps of all samples: element k of a state [rows, units] is of row k // units.  Sums and functions are
in float32, whatever is stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _sigma(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Near 0 a series, whose next term is 2e-9 of tanh x; the quotient loses what 1 - e cancels there."""
    s = x * x
    near = x * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835 - s * (1382 / 155925))))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0.0, -far, far))


@triton.jit  # type: ignore[untyped-decorator]
def lstm_kernel(gates, c, h_new, c_new, squashed, count, units, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gates i f g o of a row side by side, before and, in their place, after their functions; c' = f c + i g,
    its tanh, and h' = o tanh c'.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < count
    at = gates + (k // units).to(tl.int64) * 4 * units + k % units
    i = _sigma(tl.load(at, inside, 0.0).to(tl.float32))
    f = _sigma(tl.load(at + units, inside, 0.0).to(tl.float32))
    g = _tanh(tl.load(at + 2 * units, inside, 0.0).to(tl.float32))
    o = _sigma(tl.load(at + 3 * units, inside, 0.0).to(tl.float32))
    cell = f * tl.load(c + k, inside, 0.0).to(tl.float32) + i * g
    tanh = _tanh(cell)
    tl.store(at, i, inside)
    tl.store(at + units, f, inside)
    tl.store(at + 2 * units, g, inside)
    tl.store(at + 3 * units, o, inside)
    tl.store(c_new + k, cell, inside)
    tl.store(squashed + k, tanh, inside)
    tl.store(h_new + k, o * tanh, inside)


@triton.jit  # type: ignore[untyped-decorator]
def lstm_backward_kernel(dh, dc, scale, f, da, count, units, f_row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dc += dh s_c;  da = (dc s_i, dc s_f, dc s_g, dh s_o);  dc *= f.  Parts of `scale` and `da` side by side."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < count
    row, unit = (k // units).to(tl.int64), k % units
    s, d = scale + row * 5 * units + unit, da + row * 4 * units + unit
    raw = tl.load(dh + k, inside, 0.0).to(tl.float32)
    cell = tl.load(dc + k, inside, 0.0).to(tl.float32) + raw * tl.load(s + 4 * units, inside, 0.0).to(tl.float32)
    tl.store(d, cell * tl.load(s, inside, 0.0).to(tl.float32), inside)
    tl.store(d + units, cell * tl.load(s + units, inside, 0.0).to(tl.float32), inside)
    tl.store(d + 2 * units, cell * tl.load(s + 2 * units, inside, 0.0).to(tl.float32), inside)
    tl.store(d + 3 * units, raw * tl.load(s + 3 * units, inside, 0.0).to(tl.float32), inside)
    tl.store(dc + k, cell * tl.load(f + row * f_row + unit, inside, 0.0).to(tl.float32), inside)


@triton.jit  # type: ignore[untyped-decorator]
def gru_kernel(x, a, h, gates, inner, h_new, count, units, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """R, z = σ(x + a); n = tanh(x_n + r a_n); h' = n + (h - n) z.  Gates r z n side by side, and a_n."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < count
    at = (k // units).to(tl.int64) * 3 * units + k % units
    r = _sigma(tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(a + at, inside, 0.0).to(tl.float32))
    x, a = x + units, a + units
    z = _sigma(tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(a + at, inside, 0.0).to(tl.float32))
    x, a = x + units, a + units
    a_n = tl.load(a + at, inside, 0.0).to(tl.float32)
    n = _tanh(tl.load(x + at, inside, 0.0).to(tl.float32) + r * a_n)
    tl.store(gates + at, r, inside)
    tl.store(gates + at + units, z, inside)
    tl.store(gates + at + 2 * units, n, inside)
    tl.store(inner + k, a_n, inside)
    tl.store(h_new + k, n + (tl.load(h + k, inside, 0.0).to(tl.float32) - n) * z, inside)


def launch(kernel: Any, tensors: tuple[torch.Tensor, ...], rows: int, units: int, *more: int) -> None:
    """Run a kernel over a state [rows, units]."""
    count = rows * units
    kernel[(triton.cdiv(count, BLOCK),)](*tensors, count, units, *more, BLOCK=BLOCK, num_warps=4)
