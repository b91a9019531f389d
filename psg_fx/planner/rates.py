"""The rates of devices: shipped tables, and where those measured on this machine are kept."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch

from psg_fx.machine import cpu_model
from psg_fx.planner.cost import Device


def _float32(**rates: float) -> dict[tuple[str, torch.dtype], float]:
    return {(kind, torch.float32): rate for kind, rate in rates.items()}


# Shipped tables.  CPU: two x86-64 cores with AVX-512, fp32; `psg-fx calibrate` measures such rates, rounded here.
# CUDA: data-sheet figures of an 80 GB class device with TF32 off, derated; not measured yet.
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


CUDA = Device(
    "cuda",
    flops=_float32(gemm=4.0e13, bmm=3.5e13, conv=2.5e13, pointwise=1.5e13),
    bandwidth=2.5e12,
    launch=3e-6,
    kept=0.0,
    extra={"convolution": 1e-5, "grouped_conv_small_output": 1e-11, "grouped_conv_output": 2e-12, "scatter": 1e-11},
    origin="the shipped table",
)


def device(kind: str) -> Device:
    """The table for a device type: as measured on this machine if it was (`psg-fx calibrate`), else as shipped."""
    shipped = CUDA if kind == "cuda" else CPU
    path = table_path(shipped.name)
    return from_json(path.read_text(encoding="utf-8")) if path.exists() else shipped


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
