"""Which of 50,000 training samples does a prediction rest on? Projected gradients in a folder, and queries on it.

50,000 samples are drawn with replacement from scikit-learn's digits, and a small network is trained on them. Then the
gradient g of every sample is projected to a few numbers φ (Choe et al. 2024, arXiv:2405.13954), which go into a store,
a folder whose files are memory-mapped. The run is interrupted half way, and goes on where it stopped. The influence of
training sample i on test sample j,

    φ_j · K⁻¹ φ_i,   K = Σ_i φ_i φ_iᵀ / N + λI          (Park et al. 2023, arXiv:2303.14186)

is an inner product of φ_i with the query K⁻¹ φ_j, so that `store.top(query, k)` finds the samples with the most of it,
block by block, without holding them in memory.

    python docs/examples/influence_store.py                 # half a minute on two cores
    python docs/examples/influence_store.py --samples 600 --steps 100 --backend eager

It prints what is in the folder, and for some test digits the labels of the training samples that support them most.
With copies among 50,000 draws, the same digit may come several times.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import psg_fx
from psg_fx.demo.digits import corrupted_digits

DAMPING = 0.1
"""λ in units of the mean of K's diagonal."""


class Interrupted(Exception):
    """What ends the first run early; a signal or a crash would do as well."""


class HalfWay(DataLoader[Any]):
    """A loader that gives up in the middle."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number, batch in enumerate(super().__iter__()):
            if 2 * number > len(self):
                raise Interrupted
            yield batch


@dataclass(frozen=True)
class Outcome:
    """What main found.  before: samples in the store when the run was interrupted.  agree: how often one of the best
    `k` training samples has the label of its test digit, as a share; chance: the same for samples drawn at random.
    """

    store: psg_fx.Store
    before: int
    scores: Tensor
    places: Tensor
    agree: float
    chance: float


def train(model: nn.Module, data: Subset[Any], steps: int, batch: int) -> None:
    """Some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    draw = torch.Generator().manual_seed(0)
    images, labels = data.dataset.tensors  # type: ignore[attr-defined]
    drawn = torch.as_tensor(data.indices)
    for _ in range(steps):
        rows = drawn[torch.randint(len(drawn), (batch,), generator=draw)]
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()


def filled(data: Subset[Any], step: psg_fx.PerSampleModule, batch: int, folder: Path) -> tuple[psg_fx.Store, int]:
    """The store of all samples, from a run that is interrupted and one that goes on; and what the first one left."""
    start = time.perf_counter()
    try:
        psg_fx.over(HalfWay(data, batch), step, store=folder)
    except Interrupted:
        print(f"\ninterrupted after {time.perf_counter() - start:.1f} s: {psg_fx.Store(folder)}")
    before, start = len(psg_fx.Store(folder)), time.perf_counter()
    store = psg_fx.over(DataLoader(data, batch), step, store=folder)
    print(f"went on for {time.perf_counter() - start:.1f} s: {store}")
    assert isinstance(store, psg_fx.Store)
    return store, before


def preconditioned(store: psg_fx.Store, queries: Tensor, block: int = 2**14) -> Tensor:
    """K⁻¹ φ_j, `[Q, k]`."""
    width = queries.shape[1]
    kernel = torch.zeros(width, width, dtype=torch.float64)
    for part in store.projection.split(block):
        kernel += (part.T @ part).double()
    kernel /= len(store)
    kernel += DAMPING * kernel.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    return torch.linalg.solve(kernel, queries.T.double()).T.to(queries.dtype)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=50_000, help="drawn with replacement (default 50000)")
    parser.add_argument("--batch", type=int, default=256, help="samples in a batch (default 256)")
    parser.add_argument("--rank", type=int, default=8, help="sides of the projections (default 8)")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--test", type=int, default=8, help="test digits to explain (default 8)")
    parser.add_argument("--top", type=int, default=10, help="training samples for each (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="decides the split, the draws and the weights")
    parser.add_argument("--store", type=Path, metavar="DIR", help="where to keep the store (default: not kept)")
    parser.add_argument("--backend", default="inductor", help="as in torch.compile (default inductor)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Draws, trains, fills the store, asks it; prints and returns what it found."""
    args = arguments(argv)
    print(f"psg_fx {psg_fx.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
          f"{torch.get_num_threads()} threads, seed {args.seed}, backend {args.backend}")  # fmt: skip
    digits = corrupted_digits(0.0, args.seed)
    draw = torch.Generator().manual_seed(args.seed)
    drawn = torch.randint(len(digits.true), (args.samples,), generator=draw)
    data = Subset(TensorDataset(digits.images, digits.true), drawn.tolist())
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    train(model, data, args.steps, args.batch)
    model.eval()
    right = (model(digits.test_images).argmax(1) == digits.test_labels).double().mean().item()
    print(f"\n{args.samples} draws of {len(digits.true)} digits; a network with "
          f"{sum(p.numel() for p in model.parameters())} parameters, {right:.0%} of test digits are right")  # fmt: skip
    asked = psg_fx.Projection(rank=args.rank, seed=args.seed)
    step = psg_fx.transform(model, F.cross_entropy, quantities=asked, backend=args.backend, dynamic=True)
    with tempfile.TemporaryDirectory() as folder:
        store, before = filled(data, step, args.batch, args.store or Path(folder) / "store")
        return answers(store, before, step, digits.test_images[: args.test], digits.test_labels[: args.test],
                       digits.true[drawn], args.top)  # fmt: skip


def answers(
    store: psg_fx.Store, before: int, step: psg_fx.PerSampleModule, images: Tensor, labels: Tensor, given: Tensor,
    k: int,
) -> Outcome:  # fmt: skip
    """The training samples that support the labels of these test digits most."""
    start = time.perf_counter()
    scores, places = store.top(preconditioned(store, step(images, labels).projection), k)
    size = store.projection.nbytes / 2**20
    print(f"\nthe {k} best of {len(store)} for {len(labels)} test digits, from {size:.1f} MiB on the disk, "
          f"in {time.perf_counter() - start:.2f} s\n")  # fmt: skip
    rows = [
        [label, f"{score[0]:.3g}", place[0], " ".join(map(str, given[place].tolist()))]
        for label, score, place in zip(labels.tolist(), scores, places, strict=True)
    ]
    print(tabulate(rows, ["test digit", "best score", "of sample", f"labels of the {k} best"]))
    agree = (given[places] == labels[:, None]).double().mean().item()
    chance = (given == labels[:, None]).double().mean().item()
    print(f"\n{agree:.0%} of them have the label of the test digit; of all samples {chance:.0%}")
    return Outcome(store, before, scores, places, agree, chance)


if __name__ == "__main__":
    main()
