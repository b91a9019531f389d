"""The rates of devices: shipped tables, and where those measured on this machine are kept."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch

from psg_fx.machine import cpu_model
from psg_fx.planner.cost import REPLAYED, Device


def _float32(**rates: float) -> dict[tuple[str, torch.dtype], float]:
    return {(kind, torch.float32): rate for kind, rate in rates.items()}


# Shipped tables.  CPU: two x86-64 cores with AVX-512, fp32; `psg-fx calibrate` measures such rates, rounded here.
CPU = Device(
    "cpu",
    flops=_float32(gemm=1.7e11, bmm=1.55e11, conv=3.4e11, reduce=4.0e10, pointwise=1.5e10),
    bandwidth=2.5e10,
    launch=4e-6,
    kept=3.4e-10,
    extra={
        "convolution": 5e-5,
        "grouped_conv_small_output": 1.7e-9,
        "grouped_conv_output": 3e-10,
        "scatter": 7.5e-10,
    },
    origin="the shipped table",
)


H100 = Device(
    "cuda",
    flops=_float32(gemm=5.2e13, bmm=3.4e13, conv=2.0e13, reduce=1.4e12, pointwise=3.7e13)
    | {("gemm", torch.bfloat16): 7.1e14, ("bmm", torch.bfloat16): 3e14, ("conv", torch.bfloat16): 8.2e13}
    | {("gemm", torch.float64): 6.2e13, ("bmm", torch.float64): 3.1e13, ("conv", torch.float64): 8e12},
    bandwidth=3.0e12,
    launch=1.1e-5,
    kept=0.0,
    extra={
        "convolution": 2.4e-6,
        "grouped_conv_small_output": 6.7e-12,
        "grouped_conv_output": 1.5e-11,
        "scatter": 9.4e-12,
        REPLAYED: 1.2e-6,
    },
    origin="the shipped table of an H100",
)
"""Measured by `psg-fx calibrate` on an NVIDIA H100 80GB HBM3 with torch 2.11 (bench/results/calibrate-h100.json), TF32
off for products and on for convolutions, as torch has them; rounded.  The table for every CUDA device: no other was
measured.
"""


def device(kind: str, replayed: bool = False) -> Device:
    """The table for a device type: as measured on this machine if it was (`psg-fx calibrate`), else as shipped.

    replayed: kernels are replayed as a CUDA graph, not launched one by one.
    """
    path = table_path(kind)
    table = from_json(path.read_text(encoding="utf-8")) if path.exists() else shipped(kind)
    return table.replaying() if replayed else table


def shipped(kind: str) -> Device:
    """The table that comes with the package."""
    return H100 if kind == "cuda" else CPU


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
    flops = [[kind, str(dtype).removeprefix("torch."), rate] for (kind, dtype), rate in table.flops.items()]
    return json.dumps(vars(table) | {"flops": flops, "extra": dict(table.extra)}, indent=2) + "\n"


def from_json(text: str) -> Device:
    """The table that `to_json` wrote."""
    found = json.loads(text)
    flops = {(kind, getattr(torch, dtype)): rate for kind, dtype, rate in found.pop("flops")}
    return Device(flops=flops, **found)
