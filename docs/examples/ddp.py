"""Private training's clipped sum on several processes: each clips its share of the batch, `all_reduce` adds the sums.

A clipped sum is a sum over samples, so that nothing else needs to be known about other processes:

    Σ_b c_b g_b  =  Σ_ranks Σ_{b of the rank} c_b g_b

Noise is added once, after the sum: here by every rank with the same generator, so that all weights stay equal without
another message. The step captures and compiles the plain module on every rank; `DistributedDataParallel` is not needed,
because nothing is hooked to `p.grad`.

    python docs/examples/ddp.py --ranks 2

It trains a few steps in float64 on processes of this machine (gloo), again in one process on the whole batches, and
prints how far the clipped sums and the weights are apart: at most rounding.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx

BATCH, MAX_NORM, NOISE, LEARNING_RATE = 61, 0.5, 0.8, 0.5

Named = dict[str, Tensor]


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The same batches on every rank, inputs `[B, 1, 8, 8]` and classes `[B]`."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(BATCH, 1, 8, 8, dtype=torch.float64, generator=draw), torch.randint(4, (BATCH,), generator=draw))
        for _ in range(steps)
    ]


def train(rank: int, ranks: int, steps: int, backend: str) -> tuple[Named, Named]:
    """The clipped sum of the last step and the weights after it; ranks = 1 communicates with nobody."""
    torch.manual_seed(1)  # the same weights on every rank
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 4)).double()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.ClippedSum(MAX_NORM), backend=backend)
    noise = torch.Generator().manual_seed(2)  # and the same noise
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    total: Named = {}
    for inputs, classes in batches(steps):
        share = slice(rank, None, ranks)
        total = step(inputs[share], classes[share]).clipped_sum
        for name, p in model.named_parameters():
            # all_reduce adds memory as it lies, and how a result lies depends on the plan for this rank's batch size
            total[name] = total[name].contiguous()
            if ranks > 1:
                dist.all_reduce(total[name])
            drawn = torch.randn(p.shape, dtype=p.dtype, generator=noise)
            p.grad = (total[name] + NOISE * MAX_NORM * drawn) / BATCH
        optimizer.step()
    return total, {name: p.detach() for name, p in model.named_parameters()}


def worker(rank: int, ranks: int, steps: int, backend: str, folder: str) -> None:
    """One process: joins the others, trains, leaves its result in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.save(train(rank, ranks, steps, backend), Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def apart(a: Named, b: Named) -> float:
    """The largest difference relative to the largest entry."""
    largest = max(value.abs().max().item() for value in b.values())
    return max((a[name] - b[name]).abs().max().item() for name in b) / largest


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains on several processes and on one; prints and returns the differences, rank by rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--steps", type=int, default=5, help="training steps (default 5)")
    parser.add_argument("--backend", default="inductor", help="as in torch.compile (default inductor)")
    args = parser.parse_args(argv)
    print(f"psg_fx {psg_fx.__version__}, torch {torch.__version__}, Python {platform.python_version()}, float64, "
          f"backend {args.backend}")  # fmt: skip
    print(f"{args.steps} private steps on batches of {BATCH}, {args.ranks} processes with shares of "
          f"{', '.join(str(len(range(r, BATCH, args.ranks))) for r in range(args.ranks))}\n")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.ranks, args.steps, args.backend, folder), nprocs=args.ranks)
        found = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(args.ranks)]
    total, weights = train(0, 1, args.steps, args.backend)
    result = {
        "clipped sum": [apart(mine, total) for mine, _ in found],
        "weights": [apart(mine, weights) for _, mine in found],
    }
    for what, errors in result.items():
        print(f"{what:12} against one process: " + ", ".join(f"rank {r} {e:.1e}" for r, e in enumerate(errors)))
    equal = all(torch.equal(found[0][1][name], mine[1][name]) for mine in found for name in weights)
    print(f"weights of all ranks {'are the same to the last bit' if equal else 'DIFFER'}")
    return result


if __name__ == "__main__":
    main()
