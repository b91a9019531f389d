"""The machine that a measurement was taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from psg_fx.version import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for a result that others can judge."""
    found: dict[str, Any] = {
        "psg_fx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "matmul_precision": torch.backends.cuda.matmul.fp32_precision,
            "convolution_precision": getattr(torch.backends.cudnn, "conv", torch.backends.cudnn).fp32_precision,
        }
    return found


def cpu_model() -> str:
    """The processor's name, from the kernel where it tells, else from Python; with its family and model, since virtual
    machines call all generations of a maker by one name.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    said = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    if "model name" not in said:
        return platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {said[key]}" for key in ("cpu family", "model") if key in said]
    return ", ".join([said["model name"], *numbers])
