"""Per-sample gradients of a ResNet18, seven ways, against a float64 loop: an answer to functorch's own benchmark.

    python bench/functorch_resnet.py [--batch 128] [--only psg-compiled,vmap] [--tag NAME]

PyTorch's functorch/benchmarks/per_sample_grads.py timed functorch beside Opacus on torchvision's ResNet18 with
GroupNorm for BatchNorm, 128 images of 3×32×32, and ended with a note that the two differ and should be compared to a
source of truth. Here every answer is held against gradients in float64, sample by sample and parameter by parameter.

A ReLU whose input lies within rounding of 0 has another slope on the other side, and so has a maximum of two almost
equal values: there float32 and float64 differ by percents, and so do two ways in float32. Samples that come that close
in float64 are therefore counted, and every error is given for all samples and for those off such kinks.

The model is `psg_fx.zoo.ResNetGN` with the weights that torchvision draws for that network (seed 0): the same function,
which is checked, without the in-place ReLUs and additions that the hooks of some libraries do not allow. The images are
random, as there. Each contender has a process of its own, since its answer takes B × 45 MB; so they run one after
another, not in interleaved rounds. Writes `bench/results/functorch-resnet-<tag>.json` and `.md`. A batch of 128 takes
about fifteen minutes and at its worst (the loop in float32, which stacks its rows) 12 GB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.nn.functional as F
from _results import about, bullets, device_tag, keep, options, written_by
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from external.torchvision_import import torchvision
from psg_fx import zoo
from psg_fx.benchmarking.benchmark import failure, start_compiler
from psg_fx.benchmarking.contenders import field_of
from psg_fx.benchmarking.problem import Problem
from psg_fx.measure.clock import peak_memory, spread, time_rounds
from psg_fx.reference.by_vmap import quiet_vmap
from psg_fx.reference.loop import borrowed, reference_grads

CONTENDERS = {
    "psg-compiled": "psg_fx, compiled",
    "psg-eager": "psg_fx, eager",
    "vmap": "vmap(grad)",
    "vmap-compiled": "vmap(grad), compiled",
    "opacus-hooks": "Opacus, hooks",
    "expanded-weights": "call_for_per_sample_grads",
    "backpack": "BackPACK, BatchGrad",
    "loop": "loop over samples, float32",
}
KEPT = 4
"""Samples whose answers are kept, to compare contenders with one another."""

NEAR = 2e-6
"""A kink is near within this fraction of the largest value of the same op: some roundings of float32."""

SAMPLES = {"all": "all samples", "off": "off kinks"}
MEASURES = {
    "norm": "‖g-t‖ / ‖t‖",
    "largest": "max|g-t| / max|t|",
    "elementwise": "max|(g-t) / (t+1e-6)|",
}
"""Of one sample's gradient g of one parameter with truth t; the last one is that of functorch's benchmark."""


def main() -> int:
    args = arguments()
    if args.one is not None:
        run_one(args)
        return 0
    names = list(CONTENDERS) if args.only is None else args.only.split(",")
    if unknown := [n for n in names if n not in CONTENDERS]:
        sys.exit(f"unknown contender {unknown[0]!r}; there are: {', '.join(CONTENDERS)}")
    with tempfile.TemporaryDirectory() as folder:
        results = {name: in_own_process(name, args, Path(folder)) for name in names}
        pairs = disagreements({name: Path(folder) / f"{name}.pt" for name in names})
    data = {
        "environment": about(),
        "batch": args.batch,
        "results": results,
        "pairs": pairs,
    }
    path = keep(f"functorch-resnet-{args.tag or device_tag('cpu')}", data, *parts(data))
    print(f"\n{table(results, 'simple')}\n\nwrote {path}.json and .md")
    return 0


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--batch", type=int, default=128, help="number of images (default 128)")
    parser.add_argument("--only", help=f"separated by commas, from {', '.join(CONTENDERS)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="timing per contender (default 20)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `run_one` found out about a contender, or why it did not answer."""
    command = [__file__, "--one", name, "--folder", str(folder), "--batch", str(args.batch)]
    found = written_by([*command, "--seconds", str(args.seconds)], folder / f"{name}.json")
    print(f"{name}: {found.get('failure') or shown(found)}", flush=True)
    return found


# --- the process of one contender ------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace) -> None:
    """Time, memory and errors of one contender; the gradients of the first samples are left in a file."""
    ex = zoo.example("resnet18gn", args.batch)
    copy_weights(ex.model)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets)
    found: dict[str, Any]
    try:
        with quiet_vmap():
            found = measured(args.one, problem, args)
    except Exception as error:  # whatever it is, it is this contender's result
        found = {"failure": failure(error)}
    (args.folder / f"{args.one}.json").write_text(json.dumps(found), encoding="utf-8")


def measured(name: str, problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Errors first: they need the answer, which is then given back."""
    start_compiler(problem)
    step = field_of(["grads"], [name])[0].build(problem)
    answer = step()
    assert not isinstance(answer, Tensor)
    torch.save({n: g[:KEPT].clone() for n, g in answer.items()}, args.folder / f"{name}.pt")
    near = [margin(problem, i) < NEAR for i in range(problem.batch.size)]
    errors = errors_of(problem, answer, near)
    del answer
    times = time_rounds({name: step}, rounds=4, min_run_time=args.seconds, note=lambda text: None)[name]
    median, iqr = spread(times)
    return {
        "seconds": median,
        "iqr": iqr,
        "bytes": peak_memory(step, problem.device),
        "errors": errors,
        "near": sum(near),
    }


Errors = dict[str, dict[str, dict[str, float]]]
"""Which samples -> parameter -> measure -> its largest value over them."""


def errors_of(problem: Problem, answer: Any, near: list[bool]) -> Errors:
    """For all samples and for those that are near no kink; the truth is computed one sample at a time."""
    found = {which: {name: dict.fromkeys(MEASURES, 0.0) for name in answer} for which in SAMPLES}
    for i in range(problem.batch.size):
        _, truth = reference_grads(problem.model, problem.loss_fn, *problem.batch.sample(i))
        for name, t in truth.items():
            for measure, value in differences(answer[name][i].double(), t[0]).items():
                for which in ["all"] if near[i] else SAMPLES:
                    errors = found[which][name]
                    errors[measure] = max(errors[measure], value)
    return found


class Margins(TorchDispatchMode):
    """How near the ops that are run come to a kink, relative to the largest value there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if op is torch.ops.aten.relu.default:
            self.found.append(float(x.abs().min() / x.abs().max()))
        elif op is torch.ops.aten.max_pool2d_with_indices.default:
            windows = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2).flatten(-2)
            first, second = windows.topk(2, dim=-1).values.unbind(-1)
            self.found.append(float((first - second)[first > 0].min() / x.max()))
        return op(*args, **(kwargs or {}))


def margin(problem: Problem, i: int) -> float:
    """The least distance of sample i from a kink of the network, in float64."""
    with borrowed(problem.model, torch.float64), torch.no_grad(), Margins() as seen:
        problem.model(problem.inputs[i : i + 1].double())
    return min(seen.found)


def differences(g: Tensor, t: Tensor) -> dict[str, float]:
    """`MEASURES` of g against t, of one sample and one parameter."""
    d = g - t
    return {
        "norm": float(d.norm() / t.norm()),
        "largest": float(d.abs().max() / t.abs().max()),
        "elementwise": float((d / (t + 1e-6)).abs().max()),
    }


def copy_weights(model: nn.Module) -> None:
    """Gives the model the weights that torchvision draws with seed 0; checks that both are the same function."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = torchvision.models.resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(32, channels))
        images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for own, theirs in zip(model.parameters(), original.parameters(), strict=True):
            own.copy_(theirs)
        torch.testing.assert_close(model(images), original(images))


# --- the tables ------------------------------------------------------------------------------------------------------


def disagreements(files: dict[str, Path]) -> list[dict[str, Any]]:
    """For each pair of contenders their largest differences over parameters and the samples that were kept."""
    answers = {name: torch.load(path, mmap=True) for name, path in files.items() if path.exists()}
    found = []
    for a, b in itertools.combinations(answers, 2):
        row: dict[str, Any] = {"a": a, "b": b} | dict.fromkeys(MEASURES, 0.0)
        for name, theirs in answers[b].items():
            for g, t in zip(answers[a][name], theirs, strict=True):
                for measure, value in differences(g.double(), t.double()).items():
                    row[measure] = max(row[measure], value)
        found.append(row)
    return found


def worst(result: dict[str, Any], which: str, measure: str) -> float:
    """The largest error over parameters."""
    return max(errors[measure] for errors in result["errors"][which].values())


def shown(result: dict[str, Any]) -> str:
    size = f"{result['seconds'] * 1e3:.0f} ms, {result['bytes'] / 1e9:.2f} GB"
    errors = (f"{text} {worst(result, which, 'norm'):.1e}" for which, text in SAMPLES.items())
    return f"{size}; {MEASURES['norm']}: {', '.join(errors)}"


def table(results: dict[str, Any], style: str) -> str:
    """A row for each contender: its time and memory, and its largest errors."""
    columns = [(which, measure) for measure in MEASURES for which in SAMPLES]
    rows = []
    for name, result in results.items():
        if "failure" in result:
            rows.append([CONTENDERS[name], "-", "-", "-", *["-"] * len(columns), result["failure"]])
            continue
        size = [f"{result['seconds'] * 1e3:.0f}", f"{result['iqr'] * 1e3:.0f}", f"{result['bytes'] / 1e9:.2f}"]
        rows.append([CONTENDERS[name], *size, *(f"{worst(result, *column):.1e}" for column in columns), ""])
    errors = [f"{MEASURES[measure]}, {SAMPLES[which]}" for which, measure in columns]
    headers = ["", "median ms", "IQR ms", "peak GB", *errors, "refused"]
    return tabulate(rows, headers=[h.replace("|", "¦") for h in headers], tablefmt=style, disable_numparse=True)


def parts(data: dict[str, Any]) -> list[str]:
    """The page."""
    answered = {n: r for n, r in data["results"].items() if "failure" not in r}
    first: dict[str, Any] = next(iter(answered.values()), {"errors": {"off": {}}, "near": 0})
    by_parameter = [
        [p, *(f"{r['errors']['off'][p]['norm']:.1e}" for r in answered.values())] for p in first["errors"]["off"]
    ]
    pairs = [[CONTENDERS[r["a"]], CONTENDERS[r["b"]], *(f"{r[m]:.1e}" for m in MEASURES)] for r in data["pairs"]]
    intro = (
        "Made by `bench/functorch_resnet.py`: per-sample gradients g in float32 of ResNet18 with GroupNorm, "
        f"{data['batch']} images of 3×32×32, held against gradients t in float64, computed one sample at a time. "
        "The weights are those that torchvision draws with seed 0. Each error is the largest over samples and "
        "parameters; the last measure is that of functorch's benchmark, which divides by single entries, however "
        "small. The loop in float32 shows what rounding alone does.\n\n"
        f"{first['near']} of the {data['batch']} samples are near a kink: in float64 the input of some ReLU, or two "
        f"values of some maximum, come within {NEAR:g} of the largest value there, and rounding may take the gradient "
        "to the other side. There is no error in that, and nothing to be learnt of who computes it."
    )
    measures = [text.replace("|", "¦") for text in MEASURES.values()]
    return [
        "# ResNet18, per-sample gradients against a source of truth",
        intro,
        bullets(data["environment"]),
        table(data["results"], "github"),
        f"## One against another, {KEPT} samples",
        tabulate(pairs, headers=["g", "t", *measures], tablefmt="github", disable_numparse=True),
        f"## Parameter by parameter, off kinks: {MEASURES['norm']}",
        tabulate(by_parameter, ["parameter", *map(CONTENDERS.get, answered)], tablefmt="github", disable_numparse=True),
    ]


if __name__ == "__main__":
    sys.exit(main())
