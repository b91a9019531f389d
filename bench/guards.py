"""What a call costs beside its graph: is everything that the program reads what it was, and all other Python.

    python bench/guards.py [--models mlp,simplecnn,resnet18gn,gpt,vit,lstm] [--tag NAME]

For each model, after one eager step: microseconds to ask whether modules, parameters and buffers are as they were
(structure), whether all else that the code reads is (guard), how many places that are, and the walk that decides
where one of them differs; and a whole call (norms, a clipped sum) whose graph is replaced by its results.  A clipped
sum asks whether all norms are finite, too.  Least of several runs, CPU time of one thread.  Writes
`bench/results/guards-<tag>.json` and `.md`.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from _results import about, bullets, keep, options
from tabulate import tabulate

import psg_fx
from psg_fx import zoo

FIGURES = ("structure", "guard", "places", "walk", "norms", "clipped_sum")
HEADERS = [
    "model", "modules", "structure µs", "guard µs", "places", "walk µs", "call, norms µs", "call, clipped sum µs"
]  # fmt: skip


def main() -> None:
    parser = options(__doc__, tag=False)
    parser.add_argument("--models", default="mlp,simplecnn,resnet18gn,gpt,vit,lstm", help="separated by commas")
    parser.add_argument("--tag", default="cpu", help="names the result files (default: cpu)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    write(args.tag, {name: figures(name) for name in args.models.split(",")})


def figures(name: str) -> dict[str, Any]:
    """The costs of one model's guards."""
    made = zoo.example(name, batch=2)
    step = psg_fx.transform(made.model, made.loss_fn, backend="eager", batch_dim=made.batch_dim, progress=False)
    step(made.inputs, made.targets)
    guard = step.captures[0].guard
    structure = guard.structure
    assert guard.stands(structure)
    assert structure.holds()
    return {
        "modules": len(list(made.model.modules())), "structure": microseconds(structure.holds, 1000),
        "guard": microseconds(lambda: guard.stands(structure), 1000), "places": guard.count,
        "walk": microseconds(guard.changed, 20),
        "norms": call(made, psg_fx.Norms()), "clipped_sum": call(made, psg_fx.ClippedSum(1.0)),
    }  # fmt: skip


def call(made: zoo.Example, quantity: psg_fx.Quantity) -> float:
    """A call of a step whose graph takes no time."""
    step = psg_fx.transform(
        made.model, made.loss_fn, quantities=quantity, backend="eager", batch_dim=made.batch_dim, progress=False
    )
    step(made.inputs, made.targets)
    compiled = step.captures[0].step
    graph, results = compiled._run, []

    def recorded(*tensors: torch.Tensor) -> Any:
        results[:] = results or graph(*tensors)
        return results

    compiled._run = recorded
    step(made.inputs, made.targets)
    return microseconds(lambda: step(made.inputs, made.targets), 300)


def microseconds(function: Callable[[], object], number: int) -> float:
    """The least time of a call."""
    return 1e6 * min(timeit.repeat(function, number=number, repeat=9, timer=time.process_time)) / number


def write(tag: str, found: dict[str, dict[str, Any]]) -> None:
    """The results with versions and hardware, as JSON and as a table."""
    machine = about()
    rows = [
        [
            name,
            str(r["modules"]),
            *(f"{r[k]:.0f}" for k in ("structure", "guard", "places", "walk", "norms", "clipped_sum")),
        ]
        for name, r in found.items()
    ]
    text = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    path = keep(f"guards-{tag}", {"environment": machine, "results": found}, "# Guards", bullets(machine), text)
    print(f"{bullets(machine)}\n\n{text}\nwrote {path}.json and .md")


if __name__ == "__main__":
    main()
