"""What a contraction costs: flops and bytes as formulas, seconds by a device's measured rates (a roofline).

The formulas are written once and work on ints and on sympy expressions alike.
Roofline: Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

Size = Any
"""An int, or a sympy expression."""


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, 1 for none."""
    return reduce(mul, sizes, 1)


@dataclass(frozen=True)
class Work:
    """What one step of a tree does.

    flops: floating-point operations (a multiply-add counts two).  read, written: bytes moved to and from memory.
    out: bytes of the result, which live on.  kind: which rate of the device it runs at ("gemm", "pointwise", ...).
    calls: kernels launched.
    """

    flops: Size
    read: Size
    written: Size
    out: Size
    kind: str = "pointwise"
    calls: int = 1


@dataclass(frozen=True)
class Device:
    """Rates of a device.

    flops: flop/s for each kind of step.  bandwidth: bytes/s.  launch: seconds for a kernel.
    fresh: seconds per byte of memory that was not in use before (on CPU the first touch of a page costs as much as
    computing what goes there); it is paid by results above `reused` bytes, and by what is kept until all norms are
    known.
    extra: further constants, seconds per unit, named by the method that reads them.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    fresh: float
    kept: float
    reused: int
    extra: Mapping[str, float]

    def seconds(self, work: Work) -> float:
        """Predicted time of a step: the slower of computing and moving bytes, then launches and fresh memory."""
        compute = float(work.flops) / self.flops.get(work.kind, self.flops["pointwise"])
        fresh = float(work.out) * self.fresh if work.out > self.reused else 0.0
        return max(compute, float(work.read + work.written) / self.bandwidth) + work.calls * self.launch + fresh


# Shipped tables.  CPU: two x86-64 cores with AVX-512, fp32; bench/calibrate.py prints such rates, rounded here.
# CUDA: data-sheet figures of an 80 GB class device with TF32 off, derated; not measured yet.
CPU = Device(
    "cpu",
    flops={"gemm": 1.3e11, "bmm": 1.5e11, "conv": 1.8e11, "pointwise": 1.0e10},
    bandwidth=2.5e10,
    launch=4e-6,
    fresh=3.4e-10,
    kept=3.4e-10,
    reused=32 * 2**20,
    extra={"grouped_conv_small_output": 2.6e-9, "grouped_conv_output": 2e-10, "scatter": 1.5e-9},
)
CUDA = Device(
    "cuda",
    flops={"gemm": 4.0e13, "bmm": 3.5e13, "conv": 2.5e13, "pointwise": 1.5e13},
    bandwidth=2.5e12,
    launch=3e-6,
    fresh=0.0,
    kept=0.0,
    reused=2**62,
    extra={"grouped_conv_small_output": 1e-11, "grouped_conv_output": 2e-12, "scatter": 1e-11},
)


def device(kind: str) -> Device:
    """The table for a device type."""
    return CUDA if kind == "cuda" else CPU
