"""What bounds a step on the CPU at hand: flops, bytes and launches by a roofline, beside its time and its page faults.

    python bench/bounds.py [--models simplecnn,gpt] [--seconds S] [--tag NAME]

Predicted as `bench/roofline.py` says: of every kernel the slower of computing and moving bytes, and a launch each.  The
rates are those of this machine, measured first as `psg-fx calibrate` does; but steps run by the shipped table, as they
do for who has not calibrated, and the plans that are counted are those.  A page fault is memory that a step touches for
the first time after the allocator took it from the system: counted by the system over steps in a row, and priced by
what one costs here.  What an ordinary step is
counted by is its graph of forward and backward.  Writes `bench/results/bounds-<tag>.json` and `.md`; each model has a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from _results import about, bullets, device_tag, keep, options, printed_by
from compare import RUNS
from no_device.steps import ordinary_graph
from no_device.traffic import counted
from roofline import joint_graph, planned, prediction, timed
from tabulate import tabulate

import psg_fx
from psg_fx import zoo
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.benchmarking.contenders import field_of
from psg_fx.benchmarking.problem import Problem
from psg_fx.measure.clock import time_rounds
from psg_fx.planner import rates
from psg_fx.planner.cost import Device
from psg_fx.planner.search import plan_step
from psg_fx.quantities.names import USUAL

MODELS = "simplecnn,resnet18gn,gpt,vit,lstm"
FIELD = {
    "ordinary-eager": "ordinary", "ordinary-one-graph": "ordinary", "psg-compiled/norms": "norms",
    "psg-compiled/clipped_sum": "clipped_sum", "psg-compiled/grads": "grads", "psg-reused/grads": "grads",
}  # fmt: skip
"""Contender -> the step that is counted for it."""
HEADERS = [
    "step", "Gflop", "MB", "launches", "predicted ms", "most of it", "measured ms", "page faults", "of these ms",
]  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"separated by commas (default {MODELS})")
    parser.add_argument("--seconds", type=float, default=4.0, help="timing per contender (default 4)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(bounds(args.one, rates.from_json(os.environ["PSG_FX_RATES"]), args.seconds)))
        return
    table, cost, facts = calibrated(), fault_seconds(), about()
    found = {}
    for name in args.models.split(","):
        found[name] = printed_by(
            __file__, "--one", name, "--seconds", str(args.seconds), PSG_FX_RATES=rates.to_json(table)
        )
        print(f"## {RUNS[name].title}\n\n{rows(found[name], cost)}\n", flush=True)
    data = {"environment": facts, "rates": json.loads(rates.to_json(table)), "fault_seconds": cost, "models": found}
    text = [f"## {RUNS[name].title}\n\n{rows(steps, cost)}" for name, steps in found.items()]
    head = f"Made by `bench/bounds.py`, whose head says what is counted. A page fault costs {cost * 1e6:.2f} µs here."
    path = keep(f"bounds-{args.tag or device_tag('cpu')}", data, "# What bounds a step", head, bullets(facts), *text)
    print(f"wrote {path}.json and .md")


def calibrated() -> Device:
    """The rates of this machine, kept nowhere."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            return psg_fx.calibrate("cpu")
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def fault_seconds(size: int = 256 << 20) -> float:
    """Seconds that the first touch of a page takes, beyond those of a later one: a median of several blocks."""
    found = []
    for _ in range(5):
        with mmap.mmap(-1, size) as block:
            view = memoryview(block)
            first, before = _touched(view), _faults()
            again = _touched(view)
            assert _faults() - before < size // mmap.PAGESIZE // 10
            view.release()
        found.append((first - again) / (size // mmap.PAGESIZE))
    return median(found)


def _touched(view: memoryview) -> float:
    start = time.perf_counter()
    view[:: mmap.PAGESIZE] = b"\1" * len(view[:: mmap.PAGESIZE])
    return time.perf_counter() - start


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def bounds(name: str, table: Device, seconds: float) -> dict[str, Any]:
    """Contender -> what is counted, predicted and measured of its step."""
    run = RUNS[name]
    ex = zoo.example(run.example, run.batch, **run.sizes)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    counts = predictions(problem, table)
    steps = {c.label: c.build(problem) for c in field_of(patterns=list(FIELD)) if c.label in FIELD}
    failed: dict[str, Exception] = {}
    times = time_rounds(steps, rounds=5, min_run_time=seconds, note=lambda text: None, failed=failed)
    return {
        label: counts[FIELD[label]] | {"measured": median(times[label]), "faults": faults_of(step)}
        for label, step in steps.items()
        if label not in failed  # torch's compiler may fail on an ordinary step (an LSTM's, in one graph)
    }


def faults_of(step: Callable[[], object], runs: int = 5) -> int:
    """Page faults of one run in a row of some, the least of several such rows."""
    for _ in range(3):
        step()
    found = []
    for _ in range(3):
        before = _faults()
        for _ in range(runs):
            step()
        found.append((_faults() - before) // runs)
    return min(found)


def predictions(problem: Problem, table: Device) -> dict[str, dict[str, Any]]:
    """Step -> flops, bytes, launches and the time predicted; plans are those of the table that steps are built with."""
    joint, asked = joint_graph(problem)
    plain, gradients = counted(ordinary_graph(problem)), list(GRADIENTS.of(joint).values())
    found = {"ordinary": prediction(timed(plain, table), table)}
    for step, quantity in USUAL.items():
        if step in FIELD.values():
            plan = plan_step(gradients, quantity.asks(), asked.device, asked.batch, asked.size)
            launches = [*timed(counted(joint, asked.batch, asked.size), table), *planned(plan, table)]
            found[step] = prediction(launches, table)
    return {step: vars(p) | {"bound": p.bound} for step, p in found.items()}


def rows(steps: dict[str, Any], cost: float) -> str:
    """One model's table."""
    lines = []
    for label, of in steps.items():
        share = of["shares"][of["bound"]] / sum(of["shares"].values())
        lines.append([
            label, f"{of['flops'] / 1e9:.2f}", f"{of['bytes'] / 1e6:.0f}", of["launches"],
            f"{1e3 * of['launched']:.2f}", f"{of['bound']} {share:.0%}", f"{1e3 * of['measured']:.2f}", of["faults"],
            f"{1e3 * of['faults'] * cost:.2f}",
        ])  # fmt: skip
    return tabulate(lines, HEADERS, "github", disable_numparse=True)


if __name__ == "__main__":
    main()
