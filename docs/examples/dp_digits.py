"""Private training of a small CNN on scikit-learn's digits, in the ways that psg_fx and Opacus offer, side by side.

DP-SGD (Abadi et al. 2016, arXiv:1607.00133): every sample joins a batch with probability q, its gradient is clipped to
norm C, Gaussian noise of standard deviation σC is added to the sum, and the sum is divided by the expected batch size:

    p.grad = (Σ_b min(1, C / ‖g_b‖) g_b  +  σ C N(0, 1)) / (q N)

Opacus draws the batches, counts privacy, and adds the noise, but for the last way, where that is written out. What
psg_fx does is Opacus' part in between: the clipped sum, or the gradients of the samples. All ways start from the same
weights and get the same batches and noise, so all but the first train the same model, up to rounding, which training
amplifies.

    python docs/examples/dp_digits.py                       # a minute or two on two cores
    python docs/examples/dp_digits.py --steps 24 --backend eager

It prints a table: for each way the accuracy, the ε spent, the time of its first step (which compiles), steps per
second after that, and how far its weights are from those of Opacus' hooks. Noise of a generator with a seed is for
experiments; for a release Opacus has `secure_mode=True`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import opacus
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizerFastGradientClipping
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import psg_fx
from psg_fx.demo.digits import DigitsCNN, corrupted_digits

BATCH = 128
"""The expected size of a batch."""


@dataclass
class Setting:
    """What every way starts from: the same weights, the same order of batches, the same noise."""

    args: argparse.Namespace
    data: TensorDataset

    def __post_init__(self) -> None:
        torch.manual_seed(self.args.seed)
        self.model = DigitsCNN()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=self.args.lr, momentum=0.9)
        self.loader = DataLoader(self.data, BATCH, generator=torch.Generator().manual_seed(self.args.seed))
        self.noise = torch.Generator().manual_seed(self.args.seed + 1)

    def engine(self, engine: PrivacyEngine, module: nn.Module, mode: str) -> Any:
        """Opacus' own module, optimizer and loader (and loss, for ghost clipping)."""
        return engine.make_private(
            module=module, optimizer=self.optimizer, data_loader=self.loader, criterion=nn.CrossEntropyLoss(),
            noise_multiplier=self.args.noise, max_grad_norm=self.args.max_norm, noise_generator=self.noise,
            grad_sample_mode=mode,
        )  # fmt: skip


@dataclass
class Way:
    """A way to train.  step: one step on images `[B, 1, 8, 8]` and labels `[B]`.  epsilon: what was spent, at a δ."""

    model: nn.Module
    loader: DataLoader[Any]
    step: Callable[[Tensor, Tensor], None]
    epsilon: Callable[[float], float]
    seconds: list[float] = field(default_factory=list)


def not_private(s: Setting) -> Way:
    """The sum of the gradients, without clipping and noise."""

    def step(images: Tensor, labels: Tensor) -> None:
        s.optimizer.zero_grad()
        (F.cross_entropy(s.model(images), labels, reduction="sum") / BATCH).backward()
        s.optimizer.step()

    return Way(s.model, DPDataLoader.from_data_loader(s.loader), step, lambda delta: math.inf)


def by_hand(s: Setting) -> Way:
    """psg_fx's clipped sum; noise, division and accounting written out."""
    clipped = psg_fx.transform(
        s.model, F.cross_entropy, quantities=psg_fx.ClippedSum(s.args.max_norm), backend=s.args.backend, dynamic=True
    )
    loader, accountant = DPDataLoader.from_data_loader(s.loader), PRVAccountant()

    def step(images: Tensor, labels: Tensor) -> None:
        total = clipped(images, labels).clipped_sum
        for name, p in s.model.named_parameters():
            noise = torch.normal(0.0, s.args.noise * s.args.max_norm, p.shape, generator=s.noise)
            p.grad = (total[name] + noise) / BATCH
        s.optimizer.step()
        accountant.step(noise_multiplier=s.args.noise, sample_rate=loader.sample_rate)

    return Way(s.model, loader, step, accountant.get_epsilon)


def clipped_sum_and_opacus_optimizer(s: Setting) -> Way:
    """psg_fx's clipped sum in `p.grad`, and the optimizer of Opacus that expects it there."""
    clipped = psg_fx.transform(
        s.model, F.cross_entropy, quantities=psg_fx.ClippedSum(s.args.max_norm), backend=s.args.backend, dynamic=True
    )
    loader, accountant = DPDataLoader.from_data_loader(s.loader), PRVAccountant()
    optimizer = DPOptimizerFastGradientClipping(
        s.optimizer, noise_multiplier=s.args.noise, max_grad_norm=s.args.max_norm, expected_batch_size=BATCH,
        generator=s.noise,
    )  # fmt: skip
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(loader.sample_rate))

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        total = clipped(images, labels).clipped_sum
        for name, p in s.model.named_parameters():
            p.grad = total[name]
        optimizer.step()

    return Way(s.model, loader, step, accountant.get_epsilon)


def inside_the_engine(s: Setting) -> Way:
    """psg_fx as the module of Opacus' PrivacyEngine: `backward()` leaves `grad_sample`, Opacus does the rest."""
    module = psg_fx.transform(s.model, loss_reduction="mean", backend=s.args.backend, dynamic=True)
    return opacus_alone(s, module, "no_op")


def opacus_alone(s: Setting, module: nn.Module | None = None, mode: str = "hooks") -> Way:
    """Opacus' PrivacyEngine, as in its documentation."""
    engine = PrivacyEngine()
    module, optimizer, *criterion, loader = s.engine(engine, module or s.model, mode)
    loss_fn = criterion[0] if criterion else F.cross_entropy

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(module(images), labels).backward()
        optimizer.step()

    return Way(s.model, loader, step, engine.get_epsilon)


WAYS: dict[str, Callable[[Setting], Way]] = {
    "not private": not_private,
    "Opacus, hooks": opacus_alone,
    "Opacus, ghost clipping": lambda s: opacus_alone(s, mode="ghost"),
    "psg_fx in PrivacyEngine (no_op)": inside_the_engine,
    "psg_fx ClippedSum, Opacus' optimizer": clipped_sum_and_opacus_optimizer,
    "psg_fx ClippedSum, by hand": by_hand,
}


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Trains in all ways at once, a step of each in turn; prints and returns the table."""
    args = arguments(argv)
    print(f"psg_fx {psg_fx.__version__}, Opacus {opacus.__version__}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {torch.get_num_threads()} threads, seed {args.seed}")
    digits = corrupted_digits(0.0, args.seed)
    data, count = TensorDataset(digits.images, digits.true), len(digits.true)
    print(f"\n{count} digits to train on, {len(digits.test_labels)} for testing; each joins a batch with probability "
          f"1/{count // BATCH}, so {BATCH} are expected")  # fmt: skip
    print(f"{args.steps} steps, noise multiplier σ = {args.noise:g}, max_norm C = {args.max_norm:g}, "
          f"learning rate {args.lr:g}; backend {args.backend}")  # fmt: skip
    # Opacus says that noise from a seed is for experiments, which this is, and torch that the images need no gradient.
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    ways = {name: make(Setting(args, data)) for name, make in WAYS.items()}
    train(ways, args.steps)
    table = results(ways, digits.test_images, digits.test_labels, args.delta)
    print(f"\nε at δ = {args.delta:g} by the PRV accountant; steps/s from the median step, all ways in turn;\n"
          "weights off by: relative distance to the weights of Opacus' hooks\n")  # fmt: skip
    rows = [[name, *map(shown, row, row.values())] for name, row in table.items()]
    columns = ["way", *next(iter(table.values()))]
    print(tabulate(rows, columns, disable_numparse=True, colalign=("left", *["right"] * (len(columns) - 1))))
    return table


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120, help="training steps; 12 are one epoch (default 120)")
    parser.add_argument("--noise", type=float, default=1.0, help="noise multiplier σ (default 1)")
    parser.add_argument("--max-norm", type=float, default=1.0, help="clipping norm C (default 1)")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate of SGD with momentum 0.9 (default 0.2)")
    parser.add_argument("--delta", type=float, default=1e-4, help="δ of the reported ε (default 1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="decides the split, weights, batches and noise")
    parser.add_argument("--backend", default="inductor", help="as in torch.compile (default inductor)")
    return parser.parse_args(argv)


def train(ways: dict[str, Way], steps: int) -> None:
    """One step of each way in turn; every way draws its own batches, and all draw the same ones."""
    batches = zip(*(forever(way.loader) for way in ways.values()), strict=True)
    for done, drawn in enumerate(itertools.islice(batches, steps), 1):
        for way, (images, labels) in zip(ways.values(), drawn, strict=True):
            start = time.perf_counter()
            way.step(images, labels)
            way.seconds.append(time.perf_counter() - start)
        if done == 1:
            print(f"\nfirst steps done in {sum(way.seconds[0] for way in ways.values()):.0f} s", flush=True)
        elif done % 60 == 0:
            print(f"{done} of {steps} steps", flush=True)


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches, one pass after another."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def results(ways: dict[str, Way], images: Tensor, labels: Tensor, delta: float) -> dict[str, dict[str, float]]:
    """A row for each way."""
    reference = weights(ways["Opacus, hooks"].model)
    table = {}
    for name, way in ways.items():
        with torch.no_grad():
            accuracy = (way.model(images).argmax(1) == labels).float().mean().item()
        epsilon = way.epsilon(delta)
        distance = ((weights(way.model) - reference).norm() / reference.norm()).item()
        table[name] = {
            "accuracy": accuracy,
            "ε": epsilon,
            "first step s": way.seconds[0],
            "steps/s": 1 / statistics.median(way.seconds[1:] or way.seconds),
            "weights off by": distance if math.isfinite(epsilon) else math.nan,
        }
    return table


def weights(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def shown(column: str, value: float) -> str:
    """One entry of the table."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-"
    if value == 0:
        return "0"
    return format(value, {"accuracy": ".1%", "ε": ".2f", "weights off by": ".0e"}.get(column, ".1f"))


if __name__ == "__main__":
    main()
