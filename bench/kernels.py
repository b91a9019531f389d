"""What a CUDA device does in one step: kernels, the time it spends in each, and the host's part beside it.

    python bench/kernels.py [--models gpt-bf16,vit-bf16] [--tag NAME]

For each model the ordinary step as one graph, and gradients, norms and a clipped sum by psg_fx, the last two also with
its fused kernels, all compiled; recorded by torch's profiler. The device's time does not depend on how fast the host
is, whole steps (`bench/compare.py`) do.
Writes `bench/results/kernels-<tag>.json` and `.md`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _results import about, bullets, device_tag, keep, options
from _sizes import BATCH, WIDE
from compare import BF16, Run
from tabulate import tabulate

from psg_fx import zoo
from psg_fx.benchmarking.contenders import FUSED, ordinary_one_graph, psg
from psg_fx.benchmarking.problem import Problem
from psg_fx.measure.device_work import device_work
from psg_fx.quantities.names import USUAL

CALLS, SHOWN = 5, 12
UNFUSED = dict.fromkeys(FUSED, False)  # by default they are on where they pay


RUNS = {
    "simplecnn": Run("SimpleCNN, B=64", "simplecnn", 64),
    "gpt": Run("GPT 4×256, T=128, B=8", "gpt", 8),
    "resnet18gn": Run("ResNet18-GroupNorm 32×32, B=128", "resnet18gn", 128),
    "gpt-bf16": Run("GPT 3×768, T=512, B=16, bf16", "gpt", BATCH, WIDE["gpt"], autocast=BF16),
    "vit-bf16": Run("ViT 4×768, 224², B=16, bf16", "vit", BATCH, WIDE["vit"], autocast=BF16),
}  # fmt: skip


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--models", default=",".join(RUNS), help=f"separated by commas, from {', '.join(RUNS)}")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/kernels.py: there is no CUDA device")
    found = {name: measured(RUNS[name]) for name in args.models.split(",")}
    machine = about("cuda")
    path = keep(f"kernels-{args.tag or device_tag('cuda')}", {"environment": machine, "models": found},
                "# What the device does in one step", bullets(machine), *pages(found))  # fmt: skip
    print(f"wrote {path}.json and .md")
    return 0


def measured(run: Run) -> dict[str, Any]:
    """Step -> what it does."""
    ex = zoo.example(run.example, run.batch, "cuda", **run.sizes)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    with torch.autocast("cuda", run.autocast) if run.autocast else contextlib.nullcontext():
        steps = {"ordinary": ordinary_one_graph(problem)}
        steps |= {name: psg(problem, quantity, compiled=True, options=UNFUSED) for name, quantity in USUAL.items()}
        for name in ("norms", "clipped_sum"):
            steps[f"{name}, fused"] = psg(problem, USUAL[name], compiled=True, options=FUSED)
        return {name: recorded(step) for name, step in steps.items()}


def recorded(step: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of the device and of a whole call, kernels a call, and the longest of them."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        step()
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / CALLS
    work = device_work(step, CALLS)
    return {
        "device_ms": 1e3 * work.seconds,
        "call_ms": 1e3 * whole,
        "kernels": work.launches,
        "longest": [{"name": k.name, "ms": 1e3 * k.seconds, "calls": k.calls} for k in work.kernels[:SHOWN]],
    }


def pages(found: dict[str, Any]) -> list[str]:
    """A table of ratios for each model, and under it the longest kernels of each step."""
    parts = []
    for model, steps in found.items():
        base = steps["ordinary"]
        rows = [
            [name, f"{s['device_ms']:.2f}", f"{s['device_ms'] / base['device_ms']:.2f}", f"{s['kernels']:.0f}",
             f"{s['kernels'] / base['kernels']:.2f}", f"{s['call_ms']:.2f}"]
            for name, s in steps.items()
        ]  # fmt: skip
        headers = ["step", "device ms", "× ordinary", "kernels", "× ordinary", "call ms"]
        parts += [f"## {RUNS[model].title}", tabulate(rows, headers, "github", disable_numparse=True)]
        for name, s in steps.items():
            listed = [[f"{k['ms']:.3f}", f"{k['calls']:.0f}", f"`{k['name'][:90]}`"] for k in s["longest"]]
            parts += [f"### {name}", tabulate(listed, ["ms", "calls", "kernel"], "github", disable_numparse=True)]
    return parts


if __name__ == "__main__":
    sys.exit(main())
