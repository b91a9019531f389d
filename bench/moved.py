"""Bytes that a step moves between the memory of a CUDA device and its caches, counted by the device: Nsight Compute.

    python bench/moved.py [--models simplecnn,gpt,gpt-bf16,vit-bf16] [--tag NAME]

Inductor counts what its kernels ask for; what the second-level cache (50 MB on an H100) still holds does not come from
memory. Each step is run under `ncu` (of CUDA's toolkit), which reads the counters of every kernel without emptying
caches in between. Writes `bench/results/moved-<tag>.json` and `.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from _results import keep_of_device, options, require_cuda
from kernels import RUNS, UNFUSED
from tabulate import tabulate

from psg_fx import zoo
from psg_fx.benchmarking.contenders import ordinary_one_graph, psg
from psg_fx.benchmarking.problem import Computation, Problem
from psg_fx.quantities.names import USUAL

MODELS = "simplecnn,gpt,gpt-bf16,vit-bf16"
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")
SEPARATOR = "spin_kernel"
"""What `torch.cuda._sleep` launches: steps are told apart by it."""


def main() -> int:
    args = arguments()
    require_cuda()
    if args.one:
        run_steps(args.one)
        return 0
    results = {}
    for name in args.models.split(","):
        results[name] = counted(name)
        title = "Bytes that a step moves to and from the device's memory"
        path = keep_of_device("moved", args.tag, title, {"models": results}, *pages(results))
    print(f"wrote {path}.json and .md")
    return int(any("failure" in result for result in results.values()))


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"separated by commas, from {', '.join(RUNS)}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def steps_of(problem: Problem) -> dict[str, Callable[[], Computation]]:
    own = partial(psg, problem, compiled=True, options=UNFUSED)
    return {"ordinary": lambda: ordinary_one_graph(problem)} | {name: partial(own, q) for name, q in USUAL.items()}


def run_steps(name: str) -> None:
    """Every step of a model once, after calls that compile it, with the profiler on."""
    run = RUNS[name]
    ex = zoo.example(run.example, run.batch, "cuda", **run.sizes)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    with torch.autocast("cuda", run.autocast) if run.autocast else contextlib.nullcontext():
        for make in steps_of(problem).values():
            step = make()
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            step()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def counted(name: str) -> dict[str, Any]:
    """Step -> MB read and written, kernels, and the milliseconds they took under the profiler."""
    told = ["--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none", "--csv",
            "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS)]  # fmt: skip
    command = ["ncu", *told, sys.executable, __file__, "--one", name]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"failure": f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"}
    found: dict[str, Any] = {}
    steps = iter(["ordinary", *USUAL])
    for row in kernels_in(done.stdout.splitlines()):
        if SEPARATOR in row["Kernel Name"]:
            step = found[next(steps)] = {"read_mb": 0.0, "written_mb": 0.0, "kernels": 0, "device_ms": 0.0}
            continue
        read, wrote, took = (float(row[metric].replace(",", "")) / 1e6 for metric in METRICS)
        step["read_mb"] += read
        step["written_mb"] += wrote
        step["device_ms"] += took
        step["kernels"] += 1
    return found


def kernels_in(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """The rows of Nsight Compute's table; the line under its head holds units."""
    table = [line for line in lines if line.startswith('"')]
    for row in csv.DictReader(table):
        if row["ID"]:
            yield row


def pages(found: dict[str, Any]) -> list[str]:
    rows = []
    for model, steps in found.items():
        if "failure" in steps:
            rows.append([RUNS[model].title, steps["failure"].splitlines()[0]])
            continue
        base = steps["ordinary"]
        for name, s in steps.items():
            whole, of = (x["read_mb"] + x["written_mb"] for x in (s, base))
            rows.append([RUNS[model].title, name, f"{s['read_mb']:.0f}", f"{s['written_mb']:.0f}",
                         f"{whole / of:.2f}", s["kernels"], f"{s['device_ms']:.2f}"])  # fmt: skip
    headers = ["model", "step", "MB read", "MB written", "× ordinary", "kernels", "ms under the profiler"]
    return [tabulate(rows, headers, "github", disable_numparse=True)]


if __name__ == "__main__":
    sys.exit(main())
