"""What a step of psg_fx should take on a device that need not be here, × an ordinary step, and what bounds it.

    python bench/roofline.py [--models gpt-large,vit-base] [--again]

A prediction by a roofline, no measurement: of every launch the slower of computing and moving bytes,

    device  = Σ max(flops / rate, bytes / bandwidth) + launches × 1.6 µs      (replayed as a CUDA graph)
    step    = max(device, launches × 9.9 µs)                                  (launched one by one: the host tells each)

with the tables of `psg_fx/planner/rates.py`.  An ordinary step is its graph of forward and backward; a step of psg_fx
is its joint graph (forward, and backward as far as the sites), plus the trees that the planner chooses on that device,
by the planner's own flops, bytes and launches, each distinct node once; trees are chosen for kernels that are launched
one by one.  Both graphs are counted alike, as
`no_device/traffic.py` says.  Left out: adding up norms, clipping factors, reading a loss; copies of operands to another
memory order; autotuning; whatever a library's kernels need beside their operands.

Where a device was measured (`bench/results/*cuda-nvidia-*`) the prediction stands beside the measurement.  Writes
`bench/results/roofline.json` and `.md` after each model and goes on from there.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from _results import RESULTS, keep, options
from compare import RUNS as COMPARED
from compare import Run
from kernels import RUNS as RECORDED
from no_device.steps import ordinary_graph
from no_device.traffic import counted
from tabulate import tabulate
from torch.fx import GraphModule

from psg_fx import Grads, transform, zoo
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.benchmarking.problem import Problem
from psg_fx.planner import rates
from psg_fx.planner.cost import Device, Fused, Work
from psg_fx.planner.expr import Expr, LeafExpr
from psg_fx.planner.plan import Plan
from psg_fx.planner.search import plan_step
from psg_fx.quantities.names import USUAL

DEVICES = ("h100", "h200", "a100", "l4")
MODELS = {
    "simplecnn": COMPARED["simplecnn"], "resnet18gn": COMPARED["resnet18gn-128"], "lstm": COMPARED["lstm"],
    "gpt": COMPARED["gpt"], "gpt-3x768": RECORDED["gpt-bf16"], "vit-4x768": RECORDED["vit-bf16"],
    "gpt-large": COMPARED["gpt-large"], "vit-base": COMPARED["vit-base"],
}  # fmt: skip
"""Five models at sizes for a GPU, and those that were recorded on the H100."""
TITLES = {"gpt-3x768": "GPT 3×768, T=512, B=16", "vit-4x768": "ViT 4×768, 224², B=16"}
"""Of runs whose own titles name a precision."""
PRECISIONS = ("float32", "bfloat16")
NAME = "roofline"


@dataclass(frozen=True)
class Launch:
    """One kernel."""

    work: Work
    dtype: torch.dtype
    seconds: float
    """Computing or moving bytes, on the device that it was planned for, without the launch."""


@dataclass(frozen=True)
class Prediction:
    """Seconds: on the device when kernels are replayed, launched one by one; launches, flops, bytes; and what bounds
    it: the part of the device's time that is most of it.
    """

    replayed: float
    launched: float
    launches: int
    flops: float
    bytes: float
    shares: dict[str, float]

    @property
    def bound(self) -> str:
        return max(self.shares, key=lambda name: self.shares[name])


def main() -> int:
    parser = options(__doc__, tag=False)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--again", action="store_true", help="also models whose numbers are there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.models.split(","):
        for precision in PRECISIONS:
            if args.again or f"{name} {precision}" not in found:
                start = time.monotonic()
                found[f"{name} {precision}"] = predicted(MODELS[name], precision)
                print(f"{name} {precision}: {time.monotonic() - start:.0f} s", flush=True)
                keep(NAME, found, *page(found))
    keep(NAME, found, *page(found))
    print(f"wrote {path} and .md")
    return 0


def predicted(run: Run, precision: str) -> dict[str, Any]:
    """Device -> step -> what is predicted."""
    ex = zoo.example(run.example, run.batch, **run.sizes)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        joint, asked = joint_graph(problem)
        plain = ordinary_graph(problem)
    graphs = {"ordinary": counted(plain), "joint": counted(joint, asked.batch, asked.size)}
    found: dict[str, Any] = {}
    for name in DEVICES:
        device = rates.named(name)
        steps = {"ordinary": prediction(timed(graphs["ordinary"], device), device)}
        for step, quantity in USUAL.items():
            for label, on in ((step, device), (f"{step}, fused", replace(device, fused=Fused.ALL))):
                plan = plan_step(GRADIENTS.of(joint).values(), quantity.asks(), on, asked.batch, asked.size)
                steps[label] = prediction([*timed(graphs["joint"], device), *planned(plan, on)], device)
        least = plan_step(
            GRADIENTS.of(joint).values(), USUAL["clipped_sum"].asks(), device, asked.batch, asked.size, KEPT
        )
        steps[LEAST] = prediction([*timed(graphs["joint"], device), *planned(least, device)], device)
        found[name] = {step: vars(p) | {"bound": p.bound} for step, p in steps.items()}
    return found


def joint_graph(problem: Problem) -> tuple[GraphModule, Plan]:
    """The graph of forward and cotangents, and a plan that says for how many samples."""
    from psg_fx.planner.plan import PLAN

    step = transform(
        problem.model, problem.loss_fn, quantities=Grads(), batch_dim=problem.batch_dim, backend="eager",
        progress=False,
    )  # fmt: skip
    arguments = problem.arguments
    built, _ = step._build(step._tracked(), step._take_apart(*arguments), step.settings.quantities)
    gm = built.history.graphs["planned"]
    return gm, PLAN.of(gm)


def timed(works: Iterable[tuple[Work, torch.dtype]], device: Device) -> list[Launch]:
    """Launches of a graph, with their times on a device."""
    return [Launch(work, dtype, device.seconds(work, dtype) - work.calls * device.launch) for work, dtype in works]


def planned(plan: Plan, device: Device) -> Iterator[Launch]:
    """Launches of the planner's trees, each distinct node once."""
    nodes: dict[int, Expr] = {}
    for parameter in plan.parameters:
        for part in parameter.parts:
            nodes |= part.tree.nodes
    for node in nodes.values():
        if not isinstance(node, LeafExpr):
            work = node.work()
            yield Launch(work, node.dtype, max(node.seconds(device) - work.calls * device.launch, 0.0))


def prediction(launches: Sequence[Launch], device: Device) -> Prediction:
    """What all launches come to."""
    shares = {"flops": 0.0, "bytes": 0.0}
    for launch in launches:
        moving = float(launch.work.read + launch.work.written) / device.bandwidth
        shares["bytes" if moving >= launch.seconds else "flops"] += launch.seconds
    count = sum(launch.work.calls for launch in launches)
    shares["launches"] = count * device.replaying().launch
    replayed = sum(shares.values())
    return Prediction(
        replayed, max(replayed, count * device.launch), count,
        float(sum(launch.work.flops for launch in launches)),
        float(sum(launch.work.read + launch.work.written for launch in launches)), shares,
    )  # fmt: skip


RECORDS = {"simplecnn float32": "simplecnn", "simplecnn bfloat16": "simplecnn-bf16", "gpt float32": "gpt",
           "gpt-3x768 bfloat16": "gpt-bf16", "vit-4x768 bfloat16": "vit-bf16", "resnet18gn float32": "resnet18gn",
           "resnet18gn bfloat16": "resnet18gn-bf16"}  # fmt: skip
"""What was recorded on a device (`bench/kernels.py`), by its name there."""
RECORDED = {"h100": "kernels-cuda-nvidia-h100-80gb-hbm3", "h200": "kernels-cuda-nvidia-h200-first"}
"""Where: without kernels of psg_fx."""
LEAST, KEPT = "clipped sum, nothing kept", 1.0
"""A plan under which a byte that waits for the norms costs a second."""
STEPS = {"norms": "norms", "clipped_sum": "clipped sum", "grads": "gradients"}


def page(found: dict[str, Any]) -> list[str]:
    """A table for each device, the prediction beside what was measured, and the count beside inductor's."""
    text = ["# Roofline: a step × an ordinary step, predicted", INTRODUCTION]
    ways = ("replayed", "one by one")
    headers = ["model", "precision", *(f"{step}, {way}" for step in STEPS.values() for way in ways),
               "ordinary / clipped sum are bound by"]  # fmt: skip
    for device in DEVICES:
        rows = [[TITLES.get(model, MODELS[model].title), precision, *row(found[f"{model} {precision}"][device])]
                for model, precision in (key.split() for key in found)]  # fmt: skip
        text += [f"## {device.upper()}", _table(headers, rows)]
    text += ["## Fewer bytes on the H100", FEWER, _table(FEWER_HEADERS, list(fewer(found)))]
    text += ["## With all kernels of psg_fx on the H100", WITH_FUSED, _table(FUSED_HEADERS, list(with_fused(found)))]
    text += ["## Beside what was measured", BESIDE, _table(MEASURED, list(beside(found)))]
    text += [BESIDE_STEPS, _table(["model", "step", "how", "predicted", "measured"], list(beside_steps(found)))]
    return [*text, "## Launches and bytes beside inductor's own", COUNTED, _table(COUNTS, list(beside_inductor(found)))]


INTRODUCTION = """Made by `bench/roofline.py`, whose head says what is counted. **Nothing here was measured** but what
the last tables name. The tables of the A100 and L4 are themselves scaled from the H100's
([docs/design/cost.md](../../docs/design/cost.md)). *Replayed*: kernels in a CUDA graph (`mode="reduce-overhead"`).
*One by one*: the host tells the device each, and where that takes longer than all kernels the step is bound by the
*host*. The LSTM's ordinary step is written out over time; a device runs cuDNN's op, which is no row here."""
FEWER = """A clipped sum moves more than an ordinary step, since gradients that are kept until all norms are known are
written once and read twice. This is the plan that keeps as little as any tree does (Gram matrices, and the sum from
activations once more), × the ordinary step, predicted for replayed kernels."""
FEWER_HEADERS = ["model", "precision", "bytes: as planned", "nothing kept", "time: as planned", "nothing kept"]
WITH_FUSED = """Plans with `options={"psg_fx.fused_kernels": True}`, × the ordinary step, predicted for replayed
kernels; before the arrow as above. The prices of these kernels are derived, not measured
([docs/design/gpu.md](../../docs/design/gpu.md#fused-kernels))."""
FUSED_HEADERS = ["model", "precision", "norms: time", "bytes", "clipped sum: time", "bytes"]
BESIDE = """Time of the device alone, × the ordinary step's (the profiler's sum of kernels; plans without kernels of
psg_fx, predictions those for replayed kernels), and kernels × the ordinary step's. The last columns are the ordinary
step itself, in ms."""
BESIDE_STEPS = """Whole steps by the host's clock (`compare-cuda-nvidia-h100-80gb-hbm3.md`), × the ordinary step as one
graph, replayed ones × the replayed one. The host's Python around a step, checks among it, is in no prediction."""
COUNTED = """`make cuda` counts launches and bytes in the code that inductor generates, of the same sizes. Here: this
count over that one. Trees are those that the planner chooses for the H100 in both."""
MEASURED = ["on", "precision", "model", "step", "device: predicted", "measured", "kernels: predicted", "measured",
            "ordinary ms: predicted", "measured"]  # fmt: skip
COUNTS = ["model, precision", "step", "launches", "bytes"]


def _table(headers: list[str], rows: list[list[str]]) -> str:
    return tabulate(rows, headers, "github", disable_numparse=True)


def row(steps: dict[str, Any]) -> list[str]:
    """Ratios of one model on one device, and what bounds two of its steps."""
    base = steps["ordinary"]
    cells = [f"{steps[s][how] / base[how]:.2f}" for s in STEPS for how in ("replayed", "launched")]
    return [*cells, " / ".join(bound(steps[s]) for s in ("ordinary", "clipped_sum"))]


def bound(step: dict[str, Any]) -> str:
    """The part that is most of the device's time, and its share; and the host, if one by one it is slower."""
    share = step["shares"][step["bound"]] / step["replayed"]
    return f"{step['bound']} {share:.0%}{', host' if step['launched'] > step['replayed'] else ''}"


def fewer(found: dict[str, Any]) -> Iterator[list[str]]:
    """Bytes and time of two plans of a clipped sum."""
    for key, devices in found.items():
        model, precision = key.split()
        steps = devices["h100"]
        if LEAST in steps:
            ratios = [steps[s][what] / steps["ordinary"][what] for what in ("bytes", "replayed")
                      for s in ("clipped_sum", LEAST)]  # fmt: skip
            yield [TITLES.get(model, MODELS[model].title), precision, *(f"{ratio:.2f}" for ratio in ratios)]


def with_fused(found: dict[str, Any]) -> Iterator[list[str]]:
    """Time and bytes of norms and clipped sums, without and with the kernels."""
    for key, devices in found.items():
        (model, precision), steps = key.split(), devices["h100"]
        if "norms, fused" not in steps:
            continue
        cells = [
            " → ".join(f"{steps[s][what] / steps['ordinary'][what]:.2f}" for s in (step, f"{step}, fused"))
            for step in ("norms", "clipped_sum") for what in ("replayed", "bytes")
        ]  # fmt: skip
        yield [TITLES.get(model, MODELS[model].title), precision, *cells]


def beside(found: dict[str, Any]) -> Iterator[list[str]]:
    """The predictions and the recorded steps."""
    recorded = {
        device: json.loads((RESULTS / f"{file}.json").read_text())["models"] for device, file in RECORDED.items()
    }
    for device, (key, name) in itertools.product(RECORDED, RECORDS.items()):
        steps, there = found.get(key, {}).get(device, {}), recorded[device].get(name, {})
        for step in STEPS if steps and there else ():
            mine, own, it, plain = steps[step], steps["ordinary"], there[step], there["ordinary"]
            yield [
                device.upper(), key.split()[1], TITLES.get(key.split()[0], MODELS[key.split()[0]].title), STEPS[step],
                f"{mine['replayed'] / own['replayed']:.2f}", f"{it['device_ms'] / plain['device_ms']:.2f}",
                f"{mine['launches'] / own['launches']:.2f}", f"{it['kernels'] / plain['kernels']:.2f}",
                f"{1e3 * own['replayed']:.2f}", f"{plain['device_ms']:.2f}",
            ]  # fmt: skip


WHOLE = {
    ("simplecnn float32", "launched"): {"norms": 1.96 / 0.99, "clipped_sum": 2.32 / 0.99, "grads": 1.73 / 0.99},
    ("simplecnn float32", "replayed"): {"norms": 0.75 / 0.95, "clipped_sum": 1.04 / 0.95, "grads": 0.74 / 0.95},
    ("resnet18gn float32", "launched"): {"norms": 12.15 / 7.18, "clipped_sum": 12.41 / 7.18},
}
"""Ratios of medians that a run on the H100 printed; its JSON was lost."""


def beside_steps(found: dict[str, Any]) -> Iterator[list[str]]:
    """The prediction for the H100 and whole steps."""
    for (key, how), steps in WHOLE.items():
        for step, ratio in steps.items() if key in found else ():
            mine = found[key]["h100"]
            predicted = mine[step][how] / mine["ordinary"][how]
            way = {"launched": "one by one", "replayed": "replayed"}[how]
            yield [MODELS[key.split()[0]].title, STEPS[step], way, f"{predicted:.2f}", f"{ratio:.2f}"]


SAME = {"simplecnn": "simplecnn", "gpt": "gpt", "gpt-3x768": "gpt-large", "vit-4x768": "vit-large"}
"""Models that `make cuda` compiles in the same sizes, by its names."""


def beside_inductor(found: dict[str, Any]) -> Iterator[list[str]]:
    """Launches and bytes of both counts, as a ratio."""
    path = RESULTS / "cuda-without-a-device.json"
    theirs = json.loads(path.read_text()) if path.exists() else {}
    for key, devices in found.items():
        model, precision = key.split()
        counts = theirs.get(f"compiled {SAME.get(model)} {precision} static", {})
        for step in ("ordinary", *STEPS):
            if "launches" in counts.get(step, {}):
                mine, it = devices["h100"][step], counts[step]
                launches = mine["launches"] / (it["launches"] + it["extern"] + it.get("inside", 0))
                yield [f"{model}, {precision}", step, f"{launches:.2f}", f"{mine['bytes'] / it['bytes']:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
