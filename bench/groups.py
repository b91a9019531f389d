"""Groups of samples against single samples: what a clipped sum costs when it is one bound per user.

    python bench/groups.py [--models mlp,simplecnn,gpt] [--size 4] [--quantity clipped_sum] [--device cpu|cuda]
                           [--seconds S] [--tag NAME] [--quick]

On the same rows, in interleaved rounds: every sample by itself; groups of equal size that lie in order; the same in
any order; each sample in a group drawn at random; half of all samples in one group; and a loop over the groups with
autograd, one backward each, whose answer is compared first.  Writes `bench/results/groups-<tag>.json` and `.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _results import beside, clipped_one_by_one, require_same, settled, timing_options, told
from torch import Tensor

import psg_fx
from psg_fx import zoo
from psg_fx.quantities.names import USUAL

EACH = "each sample"
LOOP = "loop over groups"


def main() -> None:
    args = arguments()
    rows = [measured(name, args) for name in args.models.split(",")]
    told(
        "groups", f"# {args.quantity} of groups of {args.size} samples, against that of single ones", rows, args,
        size=args.size,
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = timing_options(__doc__, zoo.names(), "mlp,simplecnn,gpt")
    parser.add_argument("--size", type=int, default=4, help="samples of a group (default 4)")
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
    one_by_one = looped(found, groupings(count, args.size)["equal, in order"], args)

    def add(label: str, **given: Any) -> Any:
        step = psg_fx.transform(
            found.model, found.loss_fn, quantities=USUAL[args.quantity], batch_dim=found.batch_dim
        )  # a step of its own: compiled for these sizes alone
        runs[label] = settled(lambda: step(inputs, targets, **given), args.device)
        return step

    add(EACH)
    for label, ids in groupings(count, args.size).items():
        step = add(label, groups=ids)
        if label == "equal, in order" and args.quantity == "clipped_sum":
            require_same(step(inputs, targets, groups=ids).clipped_sum, one_by_one(), f"{name}, groups")
    runs[LOOP] = settled(one_by_one, args.device)
    return {"model": name, "B": count} | beside(runs, EACH, args)


def looped(found: zoo.Example, ids: Tensor, args: argparse.Namespace) -> Callable[[], list[Tensor]]:
    """The clipped sum by one ordinary backward for each group of a sum of losses."""
    parameters = [p for p in found.model.parameters() if p.requires_grad]
    dim = found.batch_dim[0] if isinstance(found.batch_dim, tuple) else found.batch_dim
    rows = [(ids == u).nonzero().flatten().to(args.device) for u in range(int(ids.max()) + 1)]

    def loss(own: Tensor) -> Tensor:
        return found.loss_fn(found.model(found.inputs.index_select(dim, own)), found.targets[own]) * len(own)

    return lambda: clipped_one_by_one([partial(loss, own) for own in rows], parameters)


if __name__ == "__main__":
    main()
