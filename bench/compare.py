"""One step of psg_fx beside ordinary training steps, the loop and its peers, on five models; on CUDA at its sizes.

    python bench/compare.py [--models simplecnn,gpt] [--tag NAME] [--quick] [--together SECONDS]

Every model has a process of its own, all its contenders run side by side in it. Writes
`bench/results/compare-<tag>.json` and `.md`; the tag names the device. Takes minutes, and results depend on the
machine: keep it otherwise idle. `--together`: on a machine of many cores first calls run side by side, and all
models are prepared side by side, in that many seconds at most; they are timed one after the other, the device to
themselves. On CUDA float32 is IEEE's for all contenders, and errors in bfloat16 are shown, not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import _results
import torch
from _together import one_at_a_time, together, turn
from tabulate import tabulate

from psg_fx import zoo
from psg_fx.benchmarking.benchmark import Turn, benchmark, first_call, start_compiler
from psg_fx.benchmarking.contenders import field_of
from psg_fx.benchmarking.problem import Problem
from psg_fx.benchmarking.report import BenchmarkReport, BenchmarkRow
from psg_fx.reference.by_vmap import quiet_vmap
from psg_fx.torch_private.autotuning import timed_alone


@dataclass(frozen=True)
class Run:
    """An example of the zoo with its sizes; `where`: on which kind of device it runs; autocast: in which dtype."""

    title: str
    example: str
    batch: int
    sizes: dict[str, Any] = field(default_factory=dict)
    where: tuple[str, ...] = ("cpu", "cuda")
    autocast: torch.dtype | None = None


ORDINARY = ["ordinary-eager", "ordinary-compiled", "ordinary-one-graph"]
CONTENDERS = {
    "cpu": [*ORDINARY, "loop/grads", "vmap/grads", "vmap-compiled/grads", "opacus-hooks/grads",
            "psg-eager*", "psg-compiled*", "psg-reused*"],
    "cuda": [*ORDINARY, "replayed-ordinary", "vmap/grads", "vmap-compiled/grads", "replayed-vmap/grads",
             "vmap-compiled/clipped_sum", "opacus-hooks/grads", "opacus-ghost/*", "jax/*", "psg-compiled*",
             "fused-psg/norms", "fused-psg/clipped_sum", "replayed-psg*"],
}  # fmt: skip
LARGE_GPT = {"layers": 12, "width": 768, "heads": 12, "tokens": 512}
LARGE_VIT = {"layers": 12, "width": 768, "heads": 12, "image": 224, "patch": 16, "classes": 1000}
BF16 = torch.bfloat16
RUNS = {
    "simplecnn": Run("SimpleCNN, B=64", "simplecnn", 64),
    "resnet18gn": Run("ResNet18-GroupNorm 32×32, B=16", "resnet18gn", 16, where=("cpu",)),
    "gpt": Run("GPT 4×256, T=128, V=1000, B=8", "gpt", 8),
    "vit": Run("ViT 6×192, 32², B=16", "vit", 16, where=("cpu",)),
    "lstm": Run("LSTM 128, T=32, B=32", "lstm", 32, {"width": 128, "layers": 1}),
    "resnet18gn-128": Run("ResNet18-GroupNorm 32×32, B=128", "resnet18gn", 128, where=("cuda",)),
    "resnet18gn-128-bf16": Run("ResNet18-GroupNorm 32×32, B=128, bf16", "resnet18gn", 128, {}, ("cuda",), BF16),
    "gpt-large": Run("GPT 12×768, T=512, V=1000, B=16", "gpt", 16, LARGE_GPT, ("cuda",)),
    "gpt-large-bf16": Run("GPT 12×768, T=512, V=1000, B=16, bf16", "gpt", 16, LARGE_GPT, ("cuda",), BF16),
    "vit-base": Run("ViT 12×768, 224², B=16", "vit", 16, LARGE_VIT, ("cuda",)),
    "vit-base-bf16": Run("ViT 12×768, 224², B=16, bf16", "vit", 16, LARGE_VIT, ("cuda",), BF16),
}


def main() -> int:
    args = arguments()
    if args.one is not None:
        run_one(args)
        return 0
    if args.together:
        found = together(dict.fromkeys(chosen(args), worth_compiling(args)), partial(command, args), args.together)
    else:
        found = ((n, in_own_process(n, args)) for n in chosen(args))
    name = f"compare-{args.tag or _results.device_tag(args.device)}"
    results = {}
    for model, result in found:  # kept one by one: the rest may be cut off
        results[model] = result
        data = {"results": {n: r for n, r in results.items() if "failure" not in r}}
        path = _results.keep(name, data, *paragraphs(results))
    print(f"\n{ratio_table(results, 'simple')}\n\nwrote {path}.json and .md")
    return int(any("failure" in r for r in results.values()))


def chosen(args: argparse.Namespace) -> list[str]:
    """The names of `RUNS` that are asked for: by default all that run on the device."""
    if args.models is None:
        return [name for name, run in RUNS.items() if args.device in run.where]
    names: list[str] = args.models.split(",")
    if unknown := [name for name in names if name not in RUNS]:
        sys.exit(f"unknown model {unknown[0]!r}; there are: {', '.join(RUNS)}")
    return names


def options(description: str | None) -> argparse.ArgumentParser:
    """What every race over `RUNS` may be told."""
    parser = _results.options(description, device=True)
    parser.add_argument("--models", help=f"separated by commas, from {', '.join(RUNS)}")
    parser.add_argument("--seconds", type=float, default=4.0, help="timing per contender (default 4)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: half a second per contender")
    return parser


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--contenders", help="globs separated by commas (default: the usual ones)")
    parser.add_argument("--together", type=float, metavar="SECONDS", help="all models compile at once")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--first", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The report of one model as JSON, from a process that holds nothing else."""
    print(f"\n== {RUNS[name].title}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        return _results.written_by(command(args, name, out), out)


def command(args: argparse.Namespace, name: str, out: Path, *more: str) -> list[str]:
    """What a process of a model is told."""
    told = [__file__, "--one", name, "--json", str(out), "--device", args.device, "--seconds", str(args.seconds)]
    told += ["--contenders", args.contenders] if args.contenders else []
    return [*told, *(["--quick"] if args.quick else []), *more]


def worth_compiling(args: argparse.Namespace) -> list[str]:
    """The labels of contenders that inductor compiles."""
    compiled = ("*compiled*", "*one-graph*", "replayed-*", "fused-*")
    return [c.label for c in field_of(patterns=contenders(args)) if any(fnmatchcase(c.name, p) for p in compiled)]


def contenders(args: argparse.Namespace) -> list[str]:
    """Globs."""
    return args.contenders.split(",") if args.contenders else CONTENDERS[args.device]


def run_one(args: argparse.Namespace) -> None:
    """Races all contenders on one model, or calls one of them once, and writes the report to `args.json`."""
    run = RUNS[args.one]
    if args.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # float32 is IEEE's for all: products are by default, convolutions not
    ex = zoo.example(run.example, run.batch, args.device, **run.sizes)
    lower = torch.autocast(args.device, run.autocast) if run.autocast else contextlib.nullcontext()
    if args.first:
        with lower:
            args.json.write_text(json.dumps(first_call_alone(ex, args.first)), encoding="utf-8")
        return
    tuned = timed_alone(partial(one_at_a_time, args.turns)) if args.turns else contextlib.nullcontext()
    with lower, tuned:
        report = benchmark(
            ex.model,
            ex.loss_fn,
            ex.inputs,
            ex.targets,
            batch_dim=ex.batch_dim,
            contenders=contenders(args),
            min_run_time=0.5 if args.quick else args.seconds,
            rounds=2 if args.quick else 8 if args.seconds > 1 else 4,
            tolerance=math.inf if run.autocast else 1e-2,  # of kinks that rounding passes nothing is known before
            progress=args.turns is None,
            turn=None if args.turns is None else Turn(args.until, lambda: turn(args.one, args.turns)),
        )
    print(f"\n== {run.title}\n{report}", flush=True)
    args.json.write_text(report.to_json(), encoding="utf-8")


def first_call_alone(ex: zoo.Example, label: str) -> dict[str, Any]:
    """How long it took to build this contender and to call it once, the compiler being started."""
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    (contender,) = field_of(patterns=[label])
    start_compiler(problem)
    with quiet_vmap():
        _, _, taken = first_call(contender, problem)
    return {"contender": contender.name, "quantity": contender.quantity, "first_call_s": taken}


def read(result: dict[str, Any]) -> BenchmarkReport:
    rows = [BenchmarkRow(**row) for row in result["rows"]]
    return BenchmarkReport(rows, result["problem"], result["environment"], result["notes"])


HEADERS = [
    "model",
    "ClippedSum / ordinary",
    "Norms / ordinary",
    "Grads / ordinary",
    "Grads / best peer",
    "Grads, outputs reused / best peer",
    "memory: ClippedSum / ordinary",
    "first call: ClippedSum / ordinary compiled",
]


def ratios(report: BenchmarkReport) -> list[str]:
    """What `HEADERS` says; the best peer is the fastest of vmap, compiled vmap and Opacus' hooks."""
    base, compiled = report.fastest_ordinary(), report.row("ordinary-compiled")
    clipped, norms, grads = (fastest(report, OURS, quantity) for quantity in ("clipped_sum", "norms", "grads"))
    reused = report.row("psg-reused", "grads")
    best = fastest(report, PEERS, "grads")
    return [
        _ratio(clipped, base, "median_s"),
        _ratio(norms, base, "median_s"),
        _ratio(grads, base, "median_s"),
        _ratio(grads, best, "median_s"),
        _ratio(reused, best, "median_s"),
        _ratio(report.row("psg-compiled", "clipped_sum"), base, "peak_bytes"),
        _ratio(report.row("psg-compiled", "clipped_sum"), compiled, "first_call_s"),
    ]


OURS = ("psg-compiled", "replayed-psg")
PEERS = ("vmap", "vmap-compiled", "replayed-vmap", "opacus-hooks")


def fastest(report: BenchmarkReport, names: Iterable[str], quantity: str) -> BenchmarkRow | None:
    """Of these contenders; None if no one was timed."""
    rows = [report.row(name, quantity) for name in names]
    timed = [row for row in rows if row is not None and row.median_s is not None and row.failure is None]
    return min(timed, key=lambda row: row.median_s or 0.0, default=None)


def _ratio(top: BenchmarkRow | None, bottom: BenchmarkRow | None, what: str) -> str:
    above, below = (None if row is None else getattr(row, what) for row in (top, bottom))
    return f"{above / below:.2f}" if above and below else "-"


def ratio_table(results: dict[str, Any], style: str) -> str:
    body = [
        [RUNS[name].title, *(ratios(read(r)) if "failure" not in r else [r["failure"], *[""] * (len(HEADERS) - 2)])]
        for name, r in results.items()
    ]
    return tabulate(body, headers=HEADERS, tablefmt=style, disable_numparse=True)


def paragraphs(results: dict[str, Any]) -> list[str]:
    """The ratios, then each model's table."""
    head = introduction("psg_fx beside ordinary steps and vmap", "compare", results, {})
    return [*head, ratio_table(results, "github"), *tables(results)]


def introduction(title: str, script: str, results: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """What a page of such tables is, on which machine it was made, and with which versions of other libraries."""
    machines = [r["environment"] for r in results.values() if "failure" not in r]
    made = f"Made by `bench/{script}.py`. Times are medians over interleaved rounds; *ordinary* is the fastest of the "
    made += "three ordinary training steps of that model."
    return [f"# {title}", made, *([_results.bullets(machines[0] | versions)] if machines else [])]


def tables(results: dict[str, Any]) -> Iterator[str]:
    """Each model's table; "ordinary" is always the fastest ordinary step of that model."""
    for name, result in results.items():
        yield f"## {RUNS[name].title}"
        if "failure" in result:
            yield result["failure"]
            continue
        yield ", ".join(f"{key} {value}" for key, value in result["problem"].items())
        yield read(result).to_markdown()
        yield "\n".join(result["notes"])


if __name__ == "__main__":
    sys.exit(main())
