"""From `transform` to the first answer with backend="eager": in a fresh process, and again in the same process.

    python bench/first_answer.py [--models three,simplecnn,gpt] [--processes 5] [--again 10] [--tag NAME]

For each model the CPU seconds of one thread (`time.process_time`), the least of several: of `import psg_fx` after
`import torch`, of the first answer after it, what is loaded lazily included, and of later programs like it, each a new
model and a new capture.  Each first answer is in a process of its own.  Writes `bench/results/first-answer-<tag>.json`
and `.md`.  A minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from _results import about, bullets, keep, options, printed_by

HEADERS = ["model", "import s", "first answer s", "modules loaded in it", "later answer s", "of it capture s", "ops"]
SIZES: dict[str, dict[str, Any]] = {
    "three": {},
    "simplecnn": {"batch": 4},
    "gpt": {"batch": 2, "layers": 2, "width": 64, "heads": 4, "tokens": 16, "vocabulary": 50},
}
TITLES = {"three": "linear, tanh, linear, cross-entropy", "simplecnn": "SimpleCNN", "gpt": "GPT 2×64, T=16"}


def main() -> None:
    parser = options(__doc__, tag=False)
    parser.add_argument("--models", default=",".join(SIZES), help="separated by commas (default: all)")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for each model (default 5)")
    parser.add_argument("--again", type=int, default=10, help="later programs in each process (default 10)")
    parser.add_argument("--tag", default="cpu", help="names the result files (default: cpu)")
    parser.add_argument("--one", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(answers(args.one, args.again)))
        return
    names = args.models.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.processes):  # in turn, so that what else the machine does meets all of them
        for name in names:
            runs[name].append(in_a_process(name, args.again))
    write(args.tag, {name: least(found) for name, found in runs.items()})


def in_a_process(name: str, again: int) -> dict[str, Any]:
    """The figures of one fresh process with one thread."""
    return printed_by(__file__, "--one", name, "--again", str(again), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


def answers(name: str, again: int) -> dict[str, Any]:
    """CPU seconds of the import, of the first answer, and of the later ones."""
    import torch

    torch.set_num_threads(1)
    start = time.process_time()
    import psg_fx

    imported = time.process_time() - start
    examples = [example(name) for _ in range(again + 1)]
    loaded = len(sys.modules)
    found: list[tuple[float, float, int]] = []
    for index, (model, loss_fn, inputs, targets) in enumerate(examples):
        start = time.process_time()
        step = psg_fx.transform(model, loss_fn, backend="eager", progress=False)
        step(inputs, targets)
        seconds = time.process_time() - start
        loaded = len(sys.modules) - loaded if index == 0 else loaded
        ops = sum(node.op == "call_function" for node in step.graphs["tidied"].graph.nodes)
        found.append((seconds, step.timings["capture"], ops))
    later = found[1:]
    return {
        "import": imported, "first": found[0][0], "modules": loaded,
        "later": min((seconds for seconds, _, _ in later), default=0.0),
        "capture": min((capture for _, capture, _ in later), default=0.0), "ops": found[0][2],
    }  # fmt: skip


def example(name: str) -> tuple[Any, Any, Any, Any]:
    """Model, loss, inputs and targets."""
    import torch
    from torch import nn

    from psg_fx import zoo

    if name == "three":
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        return model, nn.functional.cross_entropy, torch.randn(6, 8), torch.randint(4, (6,))
    made = zoo.example(name, **SIZES[name])
    return made.model, made.loss_fn, made.inputs, made.targets


def least(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The least of every figure: what another program takes of the machine only ever adds."""
    return {key: min(run[key] for run in runs) for key in runs[0]}


def write(tag: str, found: dict[str, dict[str, Any]]) -> None:
    """The results with versions and hardware, as JSON and as a table."""
    from tabulate import tabulate

    machine = about()
    rows = [
        [TITLES[name], f"{r['import']:.2f}", f"{r['first']:.2f}", str(r["modules"]), f"{r['later']:.3f}",
         f"{r['capture']:.3f}", str(r["ops"])]
        for name, r in found.items()
    ]  # fmt: skip
    text = tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
    data = {"environment": machine, "results": found}
    path = keep(f"first-answer-{tag}", data, "# First answers", bullets(machine), text)
    print(f"{bullets(machine)}\n\n{text}\nwrote {path}.json and .md")


if __name__ == "__main__":
    main()
