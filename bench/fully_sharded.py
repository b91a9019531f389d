"""A clipped step of a model under `fully_shard`: psg_fx beside Opacus' ghost clipping and ordinary training.

    python bench/fully_sharded.py [--processes 2] [--width 512] [--layers 4] [--tokens 128] [--samples 8] [--rounds 10]

One process for each GPU (nccl), or on the CPU (gloo). All contenders run side by side in every process, in interleaved
rounds, on equal shares of the batch; norms are compared before anything is timed. Prints the median of each, and writes
`bench/results/fully-sharded-<tag>.json` and `.md`. Keep the machine otherwise idle.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from _results import about, bullets, device_tag, keep, options
from tabulate import tabulate
from torch import Tensor, nn

import psg_fx

MAX_NORM, WORDS = 1.0, 1000


class Tagger(nn.Module):
    """An embedding, blocks of two linear layers with a norm, and a head: all layers that Opacus has samplers for."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, width), nn.Linear(width, 10)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            h = h + down(F.gelu(up(norm(h))))
        out: Tensor = self.head(h.mean(1))
        return out


def contenders(model: nn.Module, ids: Tensor, y: Tensor) -> dict[str, Callable[[], Any]]:
    """A step of each; those that clip return the norms of the own samples."""
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
        GradSampleModuleFastGradientClippingFSDP,
    )
    from opacus.optimizers.fsdpoptimizer_fast_gradient_clipping import FSDPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    ordinary, ours, theirs = (FSDP2Wrapper(copy.deepcopy(model)) for _ in range(3))
    step = psg_fx.transform(ours, F.cross_entropy, quantities=psg_fx.ClippedSum(MAX_NORM), progress=False)
    module = GradSampleModuleFastGradientClippingFSDP(theirs, max_grad_norm=MAX_NORM, loss_reduction="sum")
    optimizer = FSDPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=MAX_NORM,
        expected_batch_size=len(y), loss_reduction="sum",
    )  # fmt: skip
    loss = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")

    def trained() -> None:
        ordinary.zero_grad()
        F.cross_entropy(ordinary(ids), y).backward()

    def clipped() -> Tensor:
        out = step(ids, y)
        psg_fx.distributed.set_grad(ours, out.clipped_sum)
        return out.norms

    def ghost() -> Tensor:
        module.zero_grad()
        loss(module(ids), y).backward()
        norms: Tensor = module.per_sample_gradient_norms
        return norms

    return {"ordinary": trained, "psg_fx": clipped, "Opacus, ghost clipping": ghost}


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One process: checks, times, and, the first one, leaves the medians in the folder."""
    warnings.simplefilter("ignore")
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, meeting = ("nccl" if device.type == "cuda" else "gloo"), f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=args.processes)
    torch.manual_seed(0)
    model = Tagger(args.width, args.layers).to(device)
    torch.manual_seed(1 + rank)
    ids = torch.randint(WORDS, (args.samples, args.tokens), device=device)
    run = contenders(model, ids, torch.randint(10, (args.samples,), device=device))
    for each in run.values():
        each()
    torch.testing.assert_close(run["psg_fx"](), run["Opacus, ghost clipping"](), rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(args.rounds):
        for name, each in run.items():
            dist.barrier()
            start = time.perf_counter()
            each()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    if rank == 0:
        torch.save({name: median(found) for name, found in times.items()}, Path(folder) / "times.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = options(__doc__)
    defaults = {"processes": 2, "width": 512, "layers": 4, "tokens": 128, "samples": 8, "rounds": 10}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, folder), nprocs=args.processes)
        times: dict[str, float] = torch.load(Path(folder) / "times.pt")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [(name, 1e3 * seconds, seconds / times["ordinary"]) for name, seconds in times.items()]
    table = tabulate(rows, ("step", "ms", "of ordinary"), tablefmt="github", floatfmt=".3g")
    print(table)
    sizes = {name: getattr(args, name) for name in defaults}
    data, head = {"about": about(device), "sizes": sizes, "times": times}, bullets(about(device) | sizes)
    path = keep(f"fully-sharded-{args.tag or device_tag(device)}", data, "# Under fully_shard", head, table)
    print(f"wrote {path}.json and .md")


if __name__ == "__main__":
    main()
