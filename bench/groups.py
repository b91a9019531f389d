"""Groups of samples against single samples: what a clipped sum costs when it is one bound per user.

    python bench/groups.py [--models mlp,simplecnn,gpt] [--size 4] [--quantity clipped_sum] [--device cpu|cuda]
                           [--seconds S] [--tag NAME]

On the same rows, in interleaved rounds: every sample by itself; groups of equal size that lie in order; the same in
any order; each sample in a group drawn at random; half of all samples in one group; and a loop over the groups with
autograd, one backward each.  Writes `bench/results/groups-<tag>.json` and `.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from _results import about, bullets, device_tag, keep, options
from tabulate import tabulate
from torch import Tensor

import psg_fx
from psg_fx import zoo
from psg_fx.measure.clock import synchronize, time_rounds
from psg_fx.quantities.names import USUAL

EACH = "each sample"
LOOP = "loop over groups"


def main() -> None:
    args = arguments()
    rows = [measured(name, args) for name in args.models.split(",")]
    shown = [{k: v for k, v in row.items() if k != "ms"} for row in rows]
    text = tabulate(shown, headers="keys", tablefmt="github", floatfmt=".2f")
    title = f"# {args.quantity} of groups of {args.size} samples, against that of single ones"
    data = {"size": args.size, "quantity": args.quantity, "rows": rows, "environment": about(args.device)}
    path = keep(f"groups-{args.tag or device_tag(args.device)}", data, title, text, bullets(about(args.device)))
    print(f"{text}\nwrote {path}.json and .md")


def arguments() -> argparse.Namespace:
    parser = options(__doc__, device=True)
    parser.add_argument("--models", default="mlp,simplecnn,gpt", help=f"of {', '.join(zoo.names())}")
    parser.add_argument("--size", type=int, default=4, help="samples of a group (default 4)")
    parser.add_argument("--quantity", default="clipped_sum", choices=list(USUAL))
    parser.add_argument("--seconds", type=float, default=6.0, help="timing per contender (default 6)")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def groupings(count: int, size: int) -> dict[str, Tensor]:
    """The group of each of `count` samples, a multiple of `size`."""
    drawn = torch.Generator().manual_seed(0)
    total = count // size
    equal = torch.arange(total).repeat_interleave(size)
    half = torch.cat([torch.zeros(count // 2, dtype=torch.int64), torch.arange(1, count - count // 2 + 1)])
    return {
        "equal, in order": equal,
        "equal, in any order": equal[torch.randperm(count, generator=drawn)],
        "drawn": torch.randint(total, (count,), generator=drawn),
        "half in one": half,
    }


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model: milliseconds of every contender, and its ratio to the step of single samples."""
    found = zoo.example(name, device=args.device)
    count = len(found.targets)
    inputs, targets = found.inputs, found.targets
    runs: dict[str, Callable[[], object]] = {}

    def add(label: str, **given: Any) -> None:
        step = psg_fx.transform(
            found.model, found.loss_fn, quantities=USUAL[args.quantity], batch_dim=found.batch_dim
        )  # a step of its own: compiled for these sizes alone

        def run() -> None:
            step(inputs, targets, **given)
            synchronize(torch.device(args.device))

        run()
        runs[label] = run

    add(EACH)
    for label, ids in groupings(count, args.size).items():
        add(label, groups=ids)
    runs[LOOP] = looped(found, groupings(count, args.size)["equal, in order"], args)
    times = time_rounds(runs, rounds=args.rounds, min_run_time=args.seconds, note=lambda text: None)
    ms = {label: 1e3 * median(seconds) for label, seconds in times.items()}
    row: dict[str, Any] = {"model": name, "B": count, f"{EACH} ms": ms[EACH]}
    return row | {f"{label} ×": value / ms[EACH] for label, value in ms.items() if label != EACH} | {"ms": ms}


def looped(found: zoo.Example, ids: Tensor, args: argparse.Namespace) -> Callable[[], object]:
    """The clipped sum by one ordinary backward for each group of a sum of losses."""
    parameters = [p for p in found.model.parameters() if p.requires_grad]
    dim = found.batch_dim[0] if isinstance(found.batch_dim, tuple) else found.batch_dim
    rows = [(ids == u).nonzero().flatten().to(args.device) for u in range(int(ids.max()) + 1)]

    def run() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for own in rows:
            with torch.enable_grad():
                loss = found.loss_fn(found.model(found.inputs.index_select(dim, own)), found.targets[own]) * len(own)
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            torch._foreach_add_(total, torch._foreach_mul(gradients, (1.0 / norm).clamp(max=1.0)))
        synchronize(torch.device(args.device))

    return run


if __name__ == "__main__":
    main()
