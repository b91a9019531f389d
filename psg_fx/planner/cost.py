"""What a contraction costs: flops and bytes as formulas, seconds by a device's measured rates (a roofline).

The formulas are written once and work on ints and on sympy expressions alike.
Roofline: Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from psg_fx.tensors import Size


@dataclass(frozen=True)
class Work:
    """What one step of a tree does.

    flops: floating-point operations (a multiply-add counts two).  read, written: bytes moved to and from memory.
    kind: which rate of the device it runs at ("gemm", "pointwise", ...).  calls: kernels launched.  results: elements
    of a batched product, where few of them take as long as many.
    """

    flops: Size
    read: Size
    written: Size
    kind: str = "pointwise"
    calls: int = 1
    results: Size = 0


BEYOND_CACHES = 4 << 20
"""Bytes from which on a result is written to memory (`products.cpp` has the same)."""

FILLED = {torch.float32: "filled", torch.bfloat16: "filled_half", torch.float16: "filled_half"}
"""The constants of `Device.extra` for the elements of a batched product that occupy all of a device: each is summed by
one multiprocessor from first to last, so fewer take as long.
"""

REPLAYED = "launch_replayed"
"""The constant of `Device.extra` for seconds of a kernel in a CUDA graph."""
SIDE_BY_SIDE = "side_by_side"
"""The constant of `Device.extra` for seconds of one element in a kernel that writes several operands side by side, for
each of the operands: it may be an element of any of them.
"""


class Fused(enum.Enum):
    """Which kernels of psg_fx are offered to plans, beside those of torch: of Triton for a CUDA device, or of C++."""

    NONE = "none"
    TIMED = "those that were timed in whole steps"
    ALL = "all"
    COMPILED = "those in C++"


OF_STEPS = ("fused", "compiled", "rounded")
"""The fields of a device that say what is wanted of steps there, and nothing of the device."""


@dataclass(frozen=True)
class Device:
    """Rates of a device.

    flops: flop/s for each kind of step and dtype.  bandwidth: bytes/s.  launch: seconds for a kernel.
    kept: seconds per byte of what is kept until all norms are known, the price of its memory: on CPU the first touch.
    extra: further constants, seconds per unit or call, named by the method that reads them.
    origin: where the rates come from, as `explain()` says it.
    own_ops: whether trees may use ops of psg_fx, which other programs do not know.  fused: which kernels of psg_fx are
    wanted beside those of torch, where there are any.  compiled: whether there is a compiler for further kernels of
    psg_fx, in C++ (where steps are compiled) or of Triton.  rounded: whether gradients of float32 that wait for the
    norms may be kept in bfloat16.
    """

    name: str
    flops: Mapping[tuple[str, torch.dtype], float]
    bandwidth: float
    launch: float
    kept: float
    extra: Mapping[str, float]
    origin: str = ""
    own_ops: bool = True
    fused: Fused = Fused.NONE
    compiled: bool = False
    rounded: bool = False

    @property
    def offered(self) -> Fused:
        """Which kernels of psg_fx are offered to its plans."""
        if self.name == "cuda":
            return self.fused
        return Fused.COMPILED if self.compiled else Fused.NONE

    @property
    def launches(self) -> bool:
        """Whether each kernel is launched by itself, so that alike work is faster side by side, copies and all."""
        return self.name == "cuda"

    def replaying(self) -> Device:
        """The same where kernels are not launched one by one but replayed (CUDA graphs)."""
        return replace(self, launch=self.extra.get(REPLAYED, self.launch))

    def rate(self, kind: str, dtype: torch.dtype = torch.float32) -> float:
        """flop/s: a kind without a rate runs as pointwise ones, a dtype without one as float32, slower if wider."""
        if (kind, dtype) in self.flops:
            return self.flops[kind, dtype]
        if (kind, torch.float32) not in self.flops:
            return self.rate("pointwise", dtype)
        return self.flops[kind, torch.float32] * min(1.0, 4 / dtype.itemsize)

    def fetching(self, work: Work) -> Work:
        """The work, and that what is going to be written over is read: by whoever writes through the caches what they
        do not hold; so many bytes again of it as `extra` says, "fetched".
        """
        if work.written < BEYOND_CACHES:
            return work
        return replace(work, read=work.read + self.extra.get("fetched", 0.0) * work.written)

    def seconds(self, work: Work, dtype: torch.dtype = torch.float32) -> float:
        """Predicted time of a step: the slower of computing and moving bytes, then launches."""
        compute = float(work.flops) / self.rate(work.kind, dtype)
        filled = self.extra.get(FILLED.get(dtype, FILLED[torch.float32]), 0.0)
        if 0 < float(work.results) < filled:
            compute *= filled / float(work.results)
        return self.bounded(compute, work)

    def bounded(self, compute: float, work: Work) -> float:
        """The slower of computing for so many seconds and moving the bytes, then launches."""
        return max(compute, float(work.read + work.written) / self.bandwidth) + work.calls * self.launch
