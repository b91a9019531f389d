"""An LSTM against the number of its time steps: what a step costs, and what compiling it costs, pass by pass.

    python bench/recurrent.py [--steps 16,32,64,256] [--device cpu|cuda] [--tag NAME] [--seconds S] [--kind LSTM]

Batch 32, 128 features in and out, a head on the last state. A clipped sum and norms are timed beside ordinary steps in
interleaved rounds. Writes `bench/results/recurrent-<tag>.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from _results import device_tag, keep, options
from tabulate import tabulate
from torch import Tensor, nn

import psg_fx
from psg_fx.benchmarking.benchmark import benchmark

BATCH, WIDTH, CLASSES = 32, 128, 4
FIELD = ["ordinary-eager", "ordinary-compiled", "psg-compiled/clipped_sum", "psg-compiled/norms"]


class Classifier(nn.Module):
    """A recurrent layer over `[B, T, 128]`, and a head on its last output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 128]` -> `[B, 4]`."""
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


def main() -> None:
    args = arguments()
    rows = [measured(args.kind, steps, args.device, args.seconds) for steps in map(int, args.steps.split(","))]
    shown = [{k: v for k, v in row.items() if not isinstance(v, dict)} for row in rows]
    text = tabulate(shown, headers="keys", tablefmt="github", floatfmt=".2f")
    path = keep(f"recurrent-{args.tag or device_tag(args.device)}", rows, f"# {args.kind}, B={BATCH}", text)
    print(f"{text}\nwrote {path}.json and .md")


def arguments() -> argparse.Namespace:
    parser = options(__doc__, device=True)
    parser.add_argument("--steps", default="16,32,64,256", help="numbers of time steps, separated by commas")
    parser.add_argument("--kind", default="LSTM", choices=("LSTM", "GRU", "RNN"))
    parser.add_argument("--seconds", type=float, default=4.0, help="timing per contender (default 4)")
    return parser.parse_args()


def measured(kind: str, steps: int, device: str, seconds: float) -> dict[str, Any]:
    """One number of time steps: ms of each step, its ratio to the fastest ordinary one, and seconds of compilation."""
    torch.manual_seed(0)
    model = Classifier(kind).to(device)
    x, y = torch.randn(BATCH, steps, WIDTH, device=device), torch.randint(CLASSES, (BATCH,), device=device)
    passes = timings(model, x, y)
    report = benchmark(model, F.cross_entropy, x, y, contenders=FIELD, min_run_time=seconds)
    row: dict[str, Any] = {"T": steps}
    for found in report.rows:
        name = found.contender if found.quantity == "ordinary" else found.quantity
        row[f"{name} ms"] = None if found.median_s is None else 1e3 * found.median_s
        if found.quantity != "ordinary":
            row[f"{name} ×"] = found.ratio
    clipped = report.row("psg-compiled", "clipped_sum")
    row["capture s"] = passes["capture"]
    row["other passes s"] = sum(passes.values()) - passes["capture"]
    row["first call s"] = None if clipped is None else clipped.first_call_s
    return row | {"passes": passes, "report": json.loads(report.to_json())}


def timings(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Seconds of each pass of a clipped step, the second time it is captured."""
    for _ in range(2):
        step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.ClippedSum(max_norm=1.0), backend="eager")
        step(x, y)
    return step.timings


if __name__ == "__main__":
    main()
