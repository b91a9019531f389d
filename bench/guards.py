"""What a call costs before the graph runs: is everything that the program reads what it was?

    python bench/guards.py [--models simplecnn,resnet18gn,gpt,vit,lstm] [--tag NAME]

For each model, after one eager step: microseconds to ask whether modules, parameters and buffers are as they were
(structure), whether all else that the code reads is (guard), how many places that are, and the walk that decides
where one of them differs.  Least of several runs, CPU time of one thread.  Writes `bench/results/guards-<tag>.json` and
`.md`.
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

HEADERS = ["model", "modules", "structure µs", "guard µs", "places", "walk µs"]


def main() -> None:
    parser = options(__doc__, tag=False)
    parser.add_argument("--models", default="simplecnn,resnet18gn,gpt,vit,lstm", help="separated by commas")
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
    assert guard.holds()
    assert structure.holds()
    return {
        "modules": len(list(made.model.modules())), "structure": microseconds(structure.holds, 1000),
        "guard": microseconds(guard.holds, 1000), "places": guard.count, "walk": microseconds(guard.changed, 20),
    }  # fmt: skip


def microseconds(function: Callable[[], object], number: int) -> float:
    """The least time of a call."""
    return 1e6 * min(timeit.repeat(function, number=number, repeat=9, timer=time.process_time)) / number


def write(tag: str, found: dict[str, dict[str, Any]]) -> None:
    """The results with versions and hardware, as JSON and as a table."""
    machine = about()
    rows = [
        [name, str(r["modules"]), f"{r['structure']:.0f}", f"{r['guard']:.0f}", str(r["places"]), f"{r['walk']:.0f}"]
        for name, r in found.items()
    ]
    text = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    path = keep(f"guards-{tag}", {"environment": machine, "results": found}, "# Guards", bullets(machine), text)
    print(f"{bullets(machine)}\n\n{text}\nwrote {path}.json and .md")


if __name__ == "__main__":
    main()
