"""What data sheets say of CUDA devices, and what was published of how much of it they reach.

A table of rates is measured (`psg-fx calibrate`) or scaled from that of a measured device (`rates.scaled`): every rate
is bound by one unit of the device, and goes as that unit does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sheet:
    """A device as its maker describes it.

    fp32, tf32, bf16, fp64: flop/s at best, of dense products where matrix units take the dtype (bf16: half precision).
    bandwidth: bytes/s.  multiprocessors: their number.  clock: 1/s.  reached: what large products were measured to
    reach of a unit, in its own measure.  source: addresses.  called: names by `torch.cuda.get_device_name()`.
    """

    title: str
    fp32: float
    tf32: float
    bf16: float
    fp64: float
    bandwidth: float
    multiprocessors: int
    clock: float
    reached: Mapping[str, float] = field(default_factory=dict)
    source: tuple[str, ...] = ()
    called: tuple[str, ...] = ()

    @property
    def cycles(self) -> float:
        """Of all multiprocessors, 1/s."""
        return self.multiprocessors * self.clock

    def peak(self, unit: str) -> float:
        """What the sheet says of a unit, by its name."""
        found: float = getattr(self, unit)
        return found

    def attains(self, unit: str) -> float:
        """What a unit does in practice: as published, else the share of its peak that the H100 reaches of its own."""
        share = H100.reached.get(unit, H100.peak(unit)) / H100.peak(unit)
        return self.reached.get(unit, self.peak(unit) * share)


PRODUCTS = "https://github.com/zzc0721/torch-performance-test-data"
"""Square products by torch on many devices, the largest rate among sizes from 1,024 to 10,240 (`database.md`) and the
rate of each size (its issues).  Its H100 agrees with the one measured for psg_fx: 51.9 and 789 against 51.7 and 781
Tflop/s in float32 and bfloat16.
"""

H100 = Sheet(
    "an H100", fp32=66.9e12, tf32=494.7e12, bf16=989.4e12, fp64=66.9e12, bandwidth=3.35e12,
    multiprocessors=132, clock=1.98e9,
    reached={"fp32": 5.2e13, "tf32": 4.02e14, "bf16": 7.8e14, "fp64": 6.2e13, "bandwidth": 3.0e12},
    source=("https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet", f"{PRODUCTS}/issues/79"),
    called=("NVIDIA H100 80GB HBM3",),
)  # fmt: skip
"""SXM, 80 GB.  Reached: measured for psg_fx (`rates.H100`), TF32 by the second source."""

A100 = Sheet(
    "an A100", fp32=19.5e12, tf32=156e12, bf16=312e12, fp64=19.5e12, bandwidth=2.039e12,
    multiprocessors=108, clock=1.41e9,
    reached={"fp32": 1.92e13, "bf16": 2.65e14},
    source=(
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
        PRODUCTS,
    ),
    called=("NVIDIA A100-SXM4-80GB",),
)  # fmt: skip
"""SXM, 80 GB."""

H200 = Sheet(
    "an H200", fp32=66.9e12, tf32=494.7e12, bf16=989.4e12, fp64=66.9e12, bandwidth=4.8e12,
    multiprocessors=132, clock=1.98e9,
    reached={"fp32": 5.13e13, "bf16": 7.9e14},
    source=("https://www.nvidia.com/en-us/data-center/h200/", PRODUCTS),
    called=("NVIDIA H200",),
)  # fmt: skip

L4 = Sheet(
    "an L4", fp32=30.3e12, tf32=60e12, bf16=121e12, fp64=30.3e12 / 64, bandwidth=3.0e11,
    multiprocessors=58, clock=2.04e9,
    reached={"fp32": 1.25e13, "tf32": 2.4e13, "bf16": 5.5e13},
    source=("https://resources.nvidia.com/en-us-gpu-resources/l4-tensor-datasheet", f"{PRODUCTS}/issues/120"),
    called=("NVIDIA L4",),
)  # fmt: skip
"""Bound by its 72 W: less than half of what its sheet says is left in products of 4,096 and more.  Its sheet has no
float64; that is a 64th of float32 on this generation.
"""

SHEETS = {"a100": A100, "h100": H100, "h200": H200, "l4": L4}


PER_CYCLE = {
    (8, 0): (128, 2048, 128), (8, 6): (256, 1024, 4), (8, 9): (256, 1024, 4), (9, 0): (256, 4096, 256),
    (10, 0): (256, 8192, 128), (12, 0): (256, 1024, 4),
}  # fmt: skip
"""Compute capability -> flop in a cycle of a multiprocessor: float32, dense half precision, float64 (by matrix units
where they take it).  https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions and the makers'
white papers; TF32 has half of half precision's.
"""


def of_properties(properties: Any) -> Sheet | None:
    """The sheet that a device's own properties come to (`torch.cuda.get_device_properties`); none where they do not
    say enough, or its generation is not known.
    """
    try:
        per_cycle = PER_CYCLE[properties.major, properties.minor]
        count, clock = int(properties.multi_processor_count), properties.clock_rate * 1e3
        bandwidth = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    except (AttributeError, KeyError):
        return None
    if not (count and clock and bandwidth):
        return None
    fp32, bf16, fp64 = (flops * count * clock for flops in per_cycle)
    return Sheet(str(properties.name), fp32, bf16 / 2, bf16, fp64, bandwidth, count, clock)
