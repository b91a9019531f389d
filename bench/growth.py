"""How time and memory of a clipped sum grow with the batch, the sequence and the width, beside an ordinary step.

    python bench/growth.py [--quick] [--tag NAME]

A GPT of two layers; one size grows, the others stay. Writes `bench/results/growth-<tag>.json`, `.md` and `.png`: for
each curve the exponent p of the fit y = c·size^p over its larger half. Takes about five minutes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _results import about, bullets, device_tag, keep, options
from tabulate import tabulate

import psg_fx
from psg_fx import zoo
from psg_fx.benchmarking.contenders import ordinary_compiled
from psg_fx.benchmarking.problem import Problem
from psg_fx.measure.clock import peak_memory, spread, time_rounds

BASE = {"batch": 8, "tokens": 64, "width": 128}
GRID = {"batch": [2, 4, 8, 16, 32, 64], "tokens": [16, 32, 64, 128, 256, 512], "width": [32, 64, 128, 256, 512]}
NAMES = {"batch": "B", "tokens": "T", "width": "width"}
STEPS = ("ordinary", "clipped sum", "norms")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: two points for each curve")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    points = [
        measured(axis, size, device, 0.3 if args.quick else 1.5)
        for axis, sizes in GRID.items()
        for size in (sizes[:2] if args.quick else sizes)
    ]
    machine = about(device)
    data = {"environment": machine, "base": BASE, "points": points, "exponents": exponents(points)}
    path = keep(f"growth-{args.tag or device_tag(device)}", data, *parts(points, machine))
    plot(points, path.with_suffix(".png"))
    print(f"\n{table(points, 'simple')}\n\nwrote {path}.json, .md and .png")
    return 0


def measured(axis: str, size: int, device: str, seconds: float) -> dict[str, Any]:
    """Median seconds and peak bytes of each step at one size."""
    sizes = BASE | {axis: size}
    ex = zoo.example("gpt", sizes["batch"], device, layers=2, tokens=sizes["tokens"], width=sizes["width"], heads=4)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets)
    asked = {"clipped sum": psg_fx.ClippedSum(1.0), "norms": psg_fx.Norms()}
    made = {n: psg_fx.transform(ex.model, ex.loss_fn, quantities=q, dynamic=False) for n, q in asked.items()}
    ordinary = ordinary_compiled(problem)
    steps = {
        "ordinary": ordinary,
        **{n: lambda step=step: step(ex.inputs, ex.targets) for n, step in made.items()},
    }
    for step in steps.values():
        step()
    times = time_rounds(steps, rounds=4, min_run_time=seconds, note=lambda text: None)
    found: dict[str, Any] = {"axis": axis, "size": size}
    for name, step in steps.items():
        found[name] = {"seconds": spread(times[name])[0], "bytes": peak_memory(step, torch.device(device))}
    print(f"{NAMES[axis]}={size}: " + "; ".join(f"{n} {shown(found[n])}" for n in steps), flush=True)
    torch.compiler.reset()
    return found


def shown(point: dict[str, float]) -> str:
    return f"{point['seconds'] * 1e3:.1f} ms, {point['bytes'] / 1e6:.0f} MB"


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size), by least squares over the larger half of the sizes."""
    half = len(sizes) // 2
    x, y = [math.log(s) for s in sizes[half:]], [math.log(v) for v in values[half:]]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread_x = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread_x if spread_x else math.nan


def exponents(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Axis -> step -> "seconds" and "bytes" -> exponent."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for axis in GRID:
        own = [p for p in points if p["axis"] == axis]
        sizes = [p["size"] for p in own]
        found[axis] = {
            step: {what: exponent(sizes, [p[step][what] for p in own]) for what in ("seconds", "bytes")}
            for step in STEPS
        }
    return found


def table(points: Sequence[dict[str, Any]], style: str) -> str:
    body = [
        [NAMES[axis], step, f"{fits['seconds']:.2f}", f"{fits['bytes']:.2f}"]
        for axis, steps in exponents(points).items()
        for step, fits in steps.items()
    ]
    headers = ("grows", "step", "exponent of time", "exponent of memory")
    return tabulate(body, headers=headers, tablefmt=style, disable_numparse=True)


def parts(points: Sequence[dict[str, Any]], machine: dict[str, Any]) -> list[str]:
    """The page."""
    sizes = ", ".join(f"{NAMES[axis]} {size}" for axis, size in BASE.items())
    rows = [[f"{NAMES[p['axis']]}={p['size']}", *(shown(p[s]) for s in STEPS)] for p in points]
    return [
        "# Growth of time and memory",
        f"Made by `bench/growth.py`: a GPT of two layers, {sizes} unless it grows; the ordinary step is compiled.",
        bullets(machine),
        table(points, "github"),
        tabulate(rows, headers=("size", *STEPS), tablefmt="github"),
    ]


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Time above, memory below, a column for each size that grows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(GRID), figsize=(12, 6.5), sharey="row", constrained_layout=True)
    rows = (("seconds", 1e3, "ms for a step"), ("bytes", 1e-6, "MB at the peak"))
    for row, (what, scale, label) in enumerate(rows):
        for column, axis in enumerate(GRID):
            panel, own = axes[row][column], [p for p in points if p["axis"] == axis]
            for step, marker in zip(STEPS, "osv", strict=True):
                panel.loglog([p["size"] for p in own], [p[step][what] * scale for p in own], marker=marker, label=step)
            panel.set_xticks([p["size"] for p in own], [str(p["size"]) for p in own])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            if row:
                panel.set_xlabel(NAMES[axis])
        axes[row][0].set_ylabel(label)
    axes[0][0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
