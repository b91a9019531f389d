"""The kernels of `cells.py`.  Importing this loads Triton.

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
def lstm_backward_kernel(dh, dc, gates, c, squashed, da, count, units, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dc += dh o (1 - squashed²);  da of i f g o side by side, as the gates are;  dc *= f.  c: before the step."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < count
    first = (k // units).to(tl.int64) * 4 * units + k % units
    at, to = gates + first, da + first
    i = tl.load(at, inside, 0.0).to(tl.float32)
    f = tl.load(at + units, inside, 0.0).to(tl.float32)
    g = tl.load(at + 2 * units, inside, 0.0).to(tl.float32)
    o = tl.load(at + 3 * units, inside, 0.0).to(tl.float32)
    tanh = tl.load(squashed + k, inside, 0.0).to(tl.float32)
    of_o = tl.load(dh + k, inside, 0.0).to(tl.float32) * o
    cell = tl.load(dc + k, inside, 0.0).to(tl.float32) + of_o * (1.0 - tanh * tanh)
    tl.store(to, cell * i * g * (1.0 - i), inside)
    tl.store(to + units, cell * f * tl.load(c + k, inside, 0.0).to(tl.float32) * (1.0 - f), inside)
    tl.store(to + 2 * units, cell * i * (1.0 - g * g), inside)
    tl.store(to + 3 * units, of_o * tanh * (1.0 - o), inside)
    tl.store(dc + k, cell * f, inside)


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


@triton.jit  # type: ignore[untyped-decorator]
def gru_backward_kernel(dh, gates, inner, h, before, dx, da, count, units, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dx and da of r z n side by side, as the gates are, the same but for n;  before += dh z.  h: before the step."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < count
    at = (k // units).to(tl.int64) * 3 * units + k % units
    r = tl.load(gates + at, inside, 0.0).to(tl.float32)
    z = tl.load(gates + at + units, inside, 0.0).to(tl.float32)
    n = tl.load(gates + at + 2 * units, inside, 0.0).to(tl.float32)
    now = tl.load(dh + k, inside, 0.0).to(tl.float32)
    of_n = now * (1.0 - z) * (1.0 - n * n)
    of_r = of_n * tl.load(inner + k, inside, 0.0).to(tl.float32) * r * (1.0 - r)
    of_z = now * (tl.load(h + k, inside, 0.0).to(tl.float32) - n) * z * (1.0 - z)
    tl.store(dx + at, of_r, inside)
    tl.store(da + at, of_r, inside)
    tl.store(dx + at + units, of_z, inside)
    tl.store(da + at + units, of_z, inside)
    tl.store(dx + at + 2 * units, of_n, inside)
    tl.store(da + at + 2 * units, of_n * r, inside)
    tl.store(before + k, tl.load(before + k, inside, 0.0).to(tl.float32) + now * z, inside)


def launch(kernel: Any, tensors: tuple[torch.Tensor, ...], rows: int, units: int) -> None:
    """Run a kernel over a state [rows, units]."""
    count = rows * units
    kernel[(triton.cdiv(count, BLOCK),)](*tensors, count, units, BLOCK=BLOCK, num_warps=4)
