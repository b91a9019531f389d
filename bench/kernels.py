"""What a CUDA device does in one step: kernels, the time it spends in each, and the host's part beside it.

    python bench/kernels.py [--models gpt-bf16,vit-bf16] [--together SECONDS] [--tag NAME]

For each model the ordinary step as one graph, and gradients, norms and a clipped sum by psg_fx, the last two also with
none of its own kernels and with all of them, all compiled; and the same replayed (`mode="reduce-overhead"`, CUDA
graphs); recorded by torch's profiler, with the pauses between kernels in which the device has nothing to do. Its time
does not depend on how fast the host is, whole steps (`bench/compare.py`) do.
`--together`: on a machine of many cores the steps of all models are prepared side by side, in that many seconds at
most (what is not begun by then is left out), and recorded one model after the other.
Writes `bench/results/kernels-<tag>.json` and `.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _results import keep_of_device, options, require_cuda
from _sizes import BATCH, WIDE
from _together import in_turns, one_at_a_time, shared_cache, turn
from compare import BF16, Run
from tabulate import tabulate

from psg_fx import zoo
from psg_fx.benchmarking.contenders import FUSED, REPLAYED, ordinary_compiled, ordinary_one_graph, psg
from psg_fx.benchmarking.problem import Computation, Problem
from psg_fx.measure.device_work import device_work
from psg_fx.quantities.names import USUAL
from psg_fx.torch_private.autotuning import timed_alone

CALLS, BLOCKS, SHOWN, PAUSES = 5, 9, 12, 4
AGAIN = "replayed "
UNFUSED = dict.fromkeys(FUSED, False)  # by default they are on where they pay


RUNS = {
    "simplecnn": Run("SimpleCNN, B=64", "simplecnn", 64),
    "simplecnn-bf16": Run("SimpleCNN, B=64, bf16", "simplecnn", 64, autocast=BF16),
    "gpt": Run("GPT 4×256, T=128, B=8", "gpt", 8),
    "resnet18gn": Run("ResNet18-GroupNorm 32×32, B=128", "resnet18gn", 128),
    "resnet18gn-bf16": Run("ResNet18-GroupNorm 32×32, B=128, bf16", "resnet18gn", 128, autocast=BF16),
    "gpt-bf16": Run("GPT 3×768, T=512, B=16, bf16", "gpt", BATCH, WIDE["gpt"], autocast=BF16),
    "vit-bf16": Run("ViT 4×768, 224², B=16, bf16", "vit", BATCH, WIDE["vit"], autocast=BF16),
    "lstm": Run("LSTM 128, T=32, B=32", "lstm", 32, {"width": 128, "layers": 1}),
}  # fmt: skip


def main() -> int:
    args = arguments()
    require_cuda()
    if args.one:
        args.json.write_text(json.dumps(measured(RUNS[args.one], args)), encoding="utf-8")
        return 0
    names = args.models.split(",")
    found = together(names, args) if args.together else ((n, measured(RUNS[n], args)) for n in names)
    results = {}
    for name, result in found:  # kept one by one: the rest may be cut off
        results[name] = result
        title = "What the device does in one step"
        path = keep_of_device("kernels", args.tag, title, {"models": results}, *pages(results))
    print(f"wrote {path}.json and .md")
    return int(any("failure" in result for result in results.values()))


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--models", default=",".join(RUNS), help=f"separated by commas, from {', '.join(RUNS)}")
    parser.add_argument("--steps", default="*", help="globs separated by commas (default: all)")
    parser.add_argument("--together", type=float, metavar="SECONDS", help="all models compile at once")
    for name, kind in {"--one": str, "--json": Path, "--turns": Path, "--until": float}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def together(names: list[str], args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each model in a process of its own."""

    def command(name: str, out: Path, *more: str) -> list[str]:
        return [__file__, "--one", name, "--json", str(out), "--steps", args.steps, *more]

    with tempfile.TemporaryDirectory() as folder, shared_cache(max(1, (os.cpu_count() or 1) // len(names))):
        yield from in_turns(names, command, Path(folder), time.time() + args.together)


def measured(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Step -> what it does."""
    ex = zoo.example(run.example, run.batch, "cuda", **run.sizes)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    tuned = timed_alone(partial(one_at_a_time, args.turns)) if args.turns else contextlib.nullcontext()
    alone = turn(args.one, args.turns) if args.turns else contextlib.nullcontext()
    with torch.autocast("cuda", run.autocast) if run.autocast else contextlib.nullcontext():
        with tuned:
            steps = dict(prepared(problem, float("inf") if args.until is None else args.until, args.steps.split(",")))
        with alone:
            return {name: told if isinstance(told, dict) else recorded(told) for name, told in steps.items()}


def prepared(
    problem: Problem, until: float, patterns: Sequence[str]
) -> Iterator[tuple[str, Computation | dict[str, str]]]:
    """The steps, each called once, as long as there is time, or why one fails."""
    makers: dict[str, Callable[[], Computation]] = {
        "ordinary": lambda: ordinary_one_graph(problem),
        f"{AGAIN}ordinary": lambda: ordinary_compiled(problem, mode=REPLAYED),
    }
    for by, told in {"": None, " by torch's kernels": UNFUSED, " by all kernels": FUSED}.items():
        for name, quantity in USUAL.items() if not by else [(n, USUAL[n]) for n in ("norms", "clipped_sum")]:
            own = partial(psg, problem, quantity, compiled=True, options=told)
            makers |= {f"{name}{by}": own, f"{AGAIN}{name}{by}": partial(own, mode=REPLAYED, reuse=True)}
    for name, make in makers.items():
        if time.time() > until:
            return
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        try:
            step = make()
            step()
        except Exception as error:
            traceback.print_exc()
            yield name, {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
        else:
            yield name, step


def recorded(step: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of the device and of a whole call, kernels a call, the longest of them, and the longest pauses."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    calls = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
        calls.append((time.perf_counter() - start) / CALLS)
    work = device_work(step, CALLS)
    return {
        "device_ms": 1e3 * work.seconds,
        "call_ms": 1e3 * statistics.median(calls),
        "kernels": work.launches,
        "idle_ms": 1e3 * work.idle,
        "longest": [{"name": k.name, "ms": 1e3 * k.seconds, "calls": k.calls} for k in work.kernels[:SHOWN]],
        "pauses": [{"before": p.before, "after": p.after, "ms": 1e3 * p.seconds} for p in work.pauses[:PAUSES]],
    }


def pages(found: dict[str, Any]) -> list[str]:
    """A table of ratios for each model, and under it the longest kernels of each step."""
    parts = []
    for model, steps in found.items():
        if "failure" in steps:
            parts += [f"## {RUNS[model].title}", steps["failure"]]
            continue
        ran = {name: s for name, s in steps.items() if "failure" not in s}
        rows = [[name, s["failure"]] for name, s in steps.items() if "failure" in s]
        for name, s in ran.items():
            kinds = ("ordinary", f"{AGAIN}ordinary")
            base = next(ran[kind] for kind in (kinds[::-1] if name.startswith(AGAIN) else kinds) if kind in ran)
            cells = [(s[key], s[key] / base[key]) for key in ("device_ms", "kernels", "call_ms")]
            texts = [text for value, ratio in cells for text in (f"{value:.2f}", f"{ratio:.2f}")]
            rows.append([name, *texts, f"{s['idle_ms']:.2f}"])
        headers = ["step", "device ms", "× ordinary", "kernels", "× ordinary", "call ms", "× ordinary", "idle ms"]
        parts += [f"## {RUNS[model].title}", tabulate(rows, headers, "github", disable_numparse=True)]
        for name, s in ran.items():
            listed = [[f"{k['ms']:.3f}", f"{k['calls']:.0f}", f"`{k['name'][:90]}`"] for k in s["longest"]]
            parts += [f"### {name}", tabulate(listed, ["ms", "calls", "kernel"], "github", disable_numparse=True)]
            idle = [[f"{p['ms']:.3f}", f"`{p['before'][:60]}`", f"`{p['after'][:60]}`"] for p in s["pauses"]]
            parts += [tabulate(idle, ["idle ms", "after", "before"], "github", disable_numparse=True)] if idle else []
    return parts


if __name__ == "__main__":
    sys.exit(main())
