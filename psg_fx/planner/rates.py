"""The rates of devices: shipped tables, and where those measured on this machine are kept."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch

from psg_fx.errors import BadArgument
from psg_fx.machine import cpu_model
from psg_fx.planner import sheets
from psg_fx.planner.cost import FILLED, OF_STEPS, REPLAYED, SIDE_BY_SIDE, Device
from psg_fx.planner.sheets import Sheet
from psg_fx.source import warn
from psg_fx.tensors import short_name


def _at(*dtypes: torch.dtype, **rates: float) -> dict[tuple[str, torch.dtype], float]:
    return {(kind, dtype): rate for kind, rate in rates.items() for dtype in dtypes}


# Shipped tables.  CPU: two x86-64 cores with AVX-512, fp32; `psg-fx calibrate` measures such rates, rounded here.
CPU = Device(
    "cpu",
    flops=_at(torch.float32, gemm=1.7e11, bmm=1.55e11, tile=1.94e11, conv=3.4e11, reduce=4.0e10, pointwise=1.5e10),
    bandwidth=2.5e10,
    launch=4e-6,
    kept=3.4e-10,
    extra={
        "convolution": 5e-5,
        "conv_output": 1.8e-9,
        "grouped_conv_small_output": 1.7e-9,
        "grouped_conv_output": 3e-10,
        "scatter": 7.5e-10,
        "product": 6e-6,
        "fetched": 0.8,
    },
    origin="the shipped table",
)


H100 = Device(
    "cuda",
    flops=_at(torch.float32, gemm=5.2e13, bmm=4.7e13, conv=1.9e13, reduce=1.4e12, pointwise=4.5e13)
    | _at(torch.bfloat16, torch.float16, gemm=7.8e14, bmm=5.0e14, conv=8.1e13)
    | _at(torch.float64, gemm=6.2e13, bmm=5.6e13, conv=8.1e12),
    bandwidth=3.0e12,
    launch=9.9e-6,
    kept=0.0,
    extra={
        "convolution": 2.5e-6,
        "grouped_conv_small_output": 6.8e-12,
        "grouped_conv_output": 1.6e-11,
        "scatter": 9.9e-12,
        SIDE_BY_SIDE: 6.0e-13,
        "filled": 5.4e5,
        "filled_half": 1.1e6,
        REPLAYED: 1.6e-6,
    },
    origin="the shipped table of an H100",
)
"""Measured by `psg-fx calibrate` on an NVIDIA H100 80GB HBM3 with torch 2.11 (bench/results/calibrate-cuda-nvidia-h100-
80gb-hbm3.json), rounded; float16 is taken for bfloat16.  TF32 is off for products and on for convolutions, as torch has
them.  Tables of devices that were not measured are this one scaled.
"""

H200 = Device(
    "cuda",
    flops=_at(torch.float32, gemm=5.1e13, bmm=4.7e13, conv=2.1e13, reduce=2.0e12, pointwise=3.9e13)
    | _at(torch.bfloat16, torch.float16, gemm=7.9e14, bmm=5.2e14, conv=8.2e13)
    | _at(torch.float64, gemm=6.2e13, bmm=5.7e13, conv=8.1e12),
    bandwidth=4.2e12,
    launch=6.5e-6,
    kept=0.0,
    extra={
        "convolution": 2.3e-6,
        "grouped_conv_small_output": 6.0e-12,
        "grouped_conv_output": 1.6e-11,
        "scatter": 1.0e-11,
        SIDE_BY_SIDE: 6.0e-13,
        "filled": 5.4e5,
        "filled_half": 1.1e6,
        REPLAYED: 1.4e-6,
    },
    origin="the shipped table of an H200",
)
"""The same of an NVIDIA H200 (bench/results/calibrate-cuda-nvidia-h200.json).  Scaling the H100's would have been
within 14 % of every rate; a launch, which is the host's, took two thirds.  "filled" is what 26 Gram matrices of a GPT
in float32 and 32 of a ViT in bfloat16 took in steps there comes to, "side_by_side" what three kernels of a ViT's
clipped sum took; the H100 has it from there, too (docs/design/gpu.md).
"""

_UNITS = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "bf16"}
BOUND_BY = {
    "gemm": _UNITS,
    "bmm": _UNITS,
    "conv": dict.fromkeys(_UNITS, "cycles"),
    "reduce": dict.fromkeys(_UNITS, "bandwidth"),
    "pointwise": _UNITS,
}
"""Kind -> dtype -> the unit of a device that its rate goes with.  A product that is summed without being stored reads
four bytes for two operations: on the H100 its rate is 0.96 of the bandwidth.  Convolutions of single samples are small:
in float32 they reach a twentieth of what the H100's matrix units do in products, so these are not what bounds them.
"""
BY_CYCLES = ("grouped_conv_small_output", "grouped_conv_output", "scatter", SIDE_BY_SIDE)
"""Constants in seconds an element that go with cycles; what fills a device goes with its multiprocessors.  The others,
launches and calls, are taken to be as long on any device: they are the host's and the driver's.
"""


def scaled(sheet: Sheet) -> Device:
    """The table of a device of which no more is known than its sheet: the H100's, each rate times what the unit that
    bounds it attains there over what it attains on the H100.  No convolution is faster than products are.
    """

    def more(unit: str) -> float:
        return sheet.attains(unit) / sheets.H100.attains(unit)

    def scaled_constant(name: str, x: float) -> float:
        if name in FILLED.values():
            return x * sheet.multiprocessors / sheets.H100.multiprocessors
        return x / more("cycles") if name in BY_CYCLES else x

    def rate(kind: str, dtype: torch.dtype) -> float:
        found = H100.flops[kind, dtype] * more(BOUND_BY[kind][dtype])
        matrix = "tf32" if dtype is torch.float32 else _UNITS[dtype]
        return min(found, sheet.attains(matrix)) if kind == "conv" else found

    return Device(
        "cuda",
        flops={(kind, dtype): rate(kind, dtype) for kind, dtype in H100.flops},
        bandwidth=H100.bandwidth * more("bandwidth"),
        launch=H100.launch,
        kept=H100.kept,
        extra={name: scaled_constant(name, x) for name, x in H100.extra.items()},
        origin=f"the table of an H100 scaled to {sheet.title}",
    )


MEASURED = {"cpu": CPU, "h100": H100, "h200": H200}
"""Those of devices that were at hand."""

NAMED = {name: scaled(sheet) for name, sheet in sheets.SHEETS.items()} | MEASURED
"""The shipped tables by name."""


def named(name: str) -> Device:
    """The shipped table of a device that need not be here.  Raises BadArgument."""
    found = NAMED.get(str(name).lower())
    if found is None:
        raise BadArgument(
            f"no table of rates is called {name!r}", where="device", why=f"there are {', '.join(NAMED)}",
            fix="name one of these; psg-fx calibrate measures the device at hand",
        )  # fmt: skip
    return found


def device(kind: str, replayed: bool = False) -> Device:
    """The table for a device type: as measured on this machine if it was (`psg-fx calibrate`), else as shipped.

    replayed: kernels are replayed as a CUDA graph, not launched one by one.
    """
    table = measured(kind) or shipped(kind)
    return table.replaying() if replayed else table


def measured(kind: str) -> Device | None:
    """The table that was measured on this machine; None where there is none that can be read."""
    try:
        path = table_path(kind)
        if not path.exists():
            return None
    except (OSError, RuntimeError):  # no home, or one that is closed to this user
        return None
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        warn(f"{path} cannot be read, so the shipped rates are used (psg-fx calibrate writes it anew): {error!r}")
        return None


def fused_kernels_pay(device: torch.device) -> bool:
    """Whether kernels of psg_fx were timed on such a device, and pay: on Hopper (docs/design/gpu.md)."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def shipped(kind: str) -> Device:
    """The table that comes with the package: for a CUDA device that of its name, else one scaled by its properties.  A
    device that is not here, or says too little of itself, counts as an H100.
    """
    if kind != "cuda":
        return CPU
    if not torch.cuda.is_available() or torch.version.hip:
        return H100
    called = torch.cuda.get_device_name()
    if (known := next((name for name, s in sheets.SHEETS.items() if called in s.called), None)) is not None:
        return NAMED[known]
    sheet = sheets.of_properties(torch.cuda.get_device_properties())
    return H100 if sheet is None else scaled(sheet)


def folder() -> Path:
    """Where measured tables are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "psg_fx"


def table_path(kind: str) -> Path:
    """The file for this device, version of torch and number of threads."""
    hardware = torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else cpu_model()
    threads = f" {torch.get_num_threads()} threads" if kind == "cpu" else ""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{kind} {hardware} torch {torch.__version__}{threads}".lower())
    return folder() / f"{name}.json"


def to_json(table: Device) -> str:
    """A table as text."""
    flops = [[kind, short_name(dtype), rate] for (kind, dtype), rate in table.flops.items()]
    kept = {name: value for name, value in vars(table).items() if name not in OF_STEPS}
    return json.dumps(kept | {"flops": flops, "extra": dict(table.extra)}, indent=2) + "\n"


def from_json(text: str) -> Device:
    """The table that `to_json` wrote."""
    found = json.loads(text)
    found.pop("fused", None)  # of tables that version 0.1.0 wrote
    flops = {(kind, getattr(torch, dtype)): rate for kind, dtype, rate in found.pop("flops")}
    if found["name"] == "cpu":  # a table that was measured before there was such a rate
        flops.setdefault(("tile", torch.float32), CPU.rate("tile") / CPU.rate("bmm") * flops["bmm", torch.float32])
    return Device(flops=flops, **found)
