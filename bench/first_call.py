"""The first call of a step: with an empty cache of kernels, and in a second process that finds them.

    python bench/first_call.py [--models simplecnn,gpt] [--rounds N] [--device cpu|cuda] [--tag NAME]

For each model, a clipped sum and the ordinary step by `torch.compile`, each in a process of its own with a cache folder
of its own (`TORCHINDUCTOR_CACHE_DIR`), twice. Something trivial is compiled before, so that nobody pays for starting
the compiler. Then the same of GPTs of growing depth. With `--rounds`, both are run so many times, the steps in
turns, and the median counts. Writes
`bench/results/first-call-<tag>.json` and `.md`. Minutes; keep the machine otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from _results import about, bullets, device_tag, keep, options, printed_by
from compare import RUNS, Run
from tabulate import tabulate

import psg_fx
from psg_fx import zoo
from psg_fx.benchmarking.contenders import ordinary_compiled
from psg_fx.benchmarking.problem import Problem
from psg_fx.measure.clock import synchronize

OF_DEPTH = {"layers": 1, "width": 256, "heads": 4, "tokens": 64, "vocabulary": 500}
DEEPER = {f"gpt-{n}": Run(f"GPT {n}×256, T=64, V=500, B=4", "gpt", 4, OF_DEPTH | {"layers": n}) for n in (2, 6, 12, 24)}
EXAMPLES = RUNS | DEEPER
MODELS = ",".join(["simplecnn", "resnet18gn", "gpt", "vit", "lstm", *DEEPER])
STEPS = ("ordinary", "clipped")
HEADERS = [
    "model", "ordinary, cold s", "clipped sum, cold s", "ratio", "capture s", "other passes s", "other passes, cold %",
    "ordinary, warm s", "clipped sum, warm s", "all passes, warm %",
]  # fmt: skip


def main() -> None:
    parser = options(__doc__, device=True)
    parser.add_argument("--models", default=MODELS, help=f"separated by commas (default {MODELS})")
    parser.add_argument("--rounds", type=int, default=1, help="runs of which the median counts (default 1)")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "STEP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(first_call(*args.one, args.device)))
        return
    machine = about(args.device) | {"rounds": args.rounds}
    found: dict[str, Any] = {}
    for name in args.models.split(","):  # a run that is cut short leaves what it has
        found[name] = both(name, args.device, args.rounds)
        rows = [row(name, runs) for name, runs in found.items()]
        text = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
        data = {"environment": machine, "results": found}
        path = keep(f"first-call-{args.tag or device_tag(args.device)}", data, "# First calls", bullets(machine), text)
    print(f"{text}\nwrote {path}.json and .md")


def both(name: str, device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Of either step, the first call in two processes, one after the other, that share a folder nobody else uses."""
    found: dict[str, list[tuple[dict[str, Any], ...]]] = {step: [] for step in STEPS}
    for _ in range(rounds):
        for step, pairs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                arguments = ("--one", name, step, "--device", device)
                pair = tuple(printed_by(__file__, *arguments, TORCHINDUCTOR_CACHE_DIR=folder) for _ in range(2))
            pairs.append(pair)
            print(f"{name} {step}: cold {pair[0]['seconds']:.1f} s, warm {pair[1]['seconds']:.1f} s", flush=True)
    return {
        step: {when: median(runs) for when, runs in zip(("cold", "warm"), zip(*pairs, strict=True), strict=True)}
        for step, pairs in found.items()
    }


def median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run in the middle, with the seconds of all."""
    in_order = sorted(runs, key=lambda run: run["seconds"])
    return in_order[len(runs) // 2] | {"all": [run["seconds"] for run in in_order]}


def first_call(name: str, step: str, device: str) -> dict[str, Any]:
    """Seconds of the first call, and of its passes."""
    run = EXAMPLES[name]
    ex = zoo.example(run.example, run.batch, device, **run.sizes)
    torch.compile(lambda x: x.sin().sum())(torch.ones(8, device=device))
    start = time.perf_counter()
    timings: dict[str, float] = {}
    if step == "ordinary":
        ordinary_compiled(Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim))()
    else:
        asked = psg_fx.ClippedSum(max_norm=1.0)
        compiled = psg_fx.transform(
            ex.model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim, dynamic=False, progress=False
        )
        compiled(ex.inputs, ex.targets)
        timings = compiled.timings
    synchronize(torch.device(device))
    return {"seconds": time.perf_counter() - start, "timings": timings}


def row(name: str, runs: dict[str, Any]) -> list[str]:
    """What `HEADERS` says."""
    (oc, ow), (cc, cw) = ([runs[step][when] for when in ("cold", "warm")] for step in ("ordinary", "clipped"))
    capture, others = cc["timings"]["capture"], passes(cc) - cc["timings"]["capture"]
    return [
        EXAMPLES[name].title, f"{oc['seconds']:.1f}", f"{cc['seconds']:.1f}", f"{cc['seconds'] / oc['seconds']:.2f}",
        f"{capture:.1f}", f"{others:.1f}", f"{100 * others / cc['seconds']:.0f}",
        f"{ow['seconds']:.1f}", f"{cw['seconds']:.1f}", f"{100 * passes(cw) / cw['seconds']:.0f}",
    ]  # fmt: skip


def passes(run: dict[str, Any]) -> float:
    """Seconds of all passes; the compiler is not one."""
    return sum(seconds for name, seconds in run["timings"].items() if name != "compile")


if __name__ == "__main__":
    main()
