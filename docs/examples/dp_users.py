"""Private training with one bound per user: what is hidden is not a sample, but everything that one user has sent.

scikit-learn's digits, dealt out to users who have between 2 and 16 of them each. Every user joins a batch with
probability q, with all samples (McMahan et al. 2018, arXiv:1710.06963). With g_u the sum of the gradients of user u's
samples, a step is

    p.grad = (Σ_u min(1, C / ‖g_u‖) g_u  +  σ C N(0, 1)) / (q N)        N: users

so that a user changes the sum by at most C, and the accountant of DP-SGD counts users. psg_fx clips by user where it is
told whose each sample is: `step(images, labels, groups=users, num_groups=N)`.

Beside it, the same promise to users by clipping each sample: whoever has 16 samples may change that sum by 16 C, and
the noise must be made for that. Both ways see the same batches.

    python docs/examples/dp_users.py                        # half a minute on two cores
    python docs/examples/dp_users.py --steps 24 --backend eager

It prints the accuracy and the ε, per user, of each way. Noise of a generator with a seed is for experiments.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from opacus.accountants import PRVAccountant
from tabulate import tabulate
from torch import Tensor, nn

import psg_fx
from psg_fx.demo.digits import DigitsCNN, corrupted_digits

MOST = 16
"""Samples that a user has at most."""

Sum = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
"""Images, labels and users of a batch -> the sum of what was clipped, by parameter."""


@dataclass(frozen=True)
class Federation:
    """The samples of all users; users: the number of whom each sample is from."""

    images: Tensor
    labels: Tensor
    users: Tensor
    count: int


@dataclass(frozen=True)
class Way:
    """A way to train.  sensitivity: how much one user changes the sum, at most."""

    model: nn.Module
    total: Sum
    sensitivity: float
    noise: float


def dealt(seed: int) -> tuple[Federation, Tensor, Tensor]:
    """The digits of users, and images and labels for testing."""
    digits, draw = corrupted_digits(0.0, seed), torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, MOST + 1, (len(digits.true),), generator=draw)
    users = torch.arange(len(sizes)).repeat_interleave(sizes)[: len(digits.true)]
    return Federation(digits.images, digits.true, users, int(users[-1]) + 1), digits.test_images, digits.test_labels


def ways(args: argparse.Namespace, users: int) -> dict[str, Way]:
    """Every way, from the same weights."""

    def model() -> nn.Module:
        torch.manual_seed(args.seed)
        return DigitsCNN()

    def clipped(chosen: nn.Module, bound: float) -> psg_fx.PerSampleModule:
        quantity = psg_fx.ClippedSum(bound)
        return psg_fx.transform(chosen, F.cross_entropy, quantities=quantity, backend=args.backend, dynamic=True)

    def by_user(chosen: nn.Module, bound: float) -> Sum:
        step = clipped(chosen, bound)
        return lambda x, y, whose: step(x, y, groups=whose, num_groups=users).clipped_sum

    def by_sample(chosen: nn.Module, bound: float) -> Sum:
        step = clipped(chosen, bound)
        return lambda x, y, whose: step(x, y).clipped_sum

    free, own, each, bound = model(), model(), model(), args.max_norm
    return {
        "a bound per user, no noise": Way(free, by_user(free, bound), bound, 0.0),
        "a bound per user": Way(own, by_user(own, bound), bound, args.noise),
        f"a bound per sample, noise for {MOST}": Way(each, by_sample(each, bound / MOST), bound, args.noise),
    }


def train(way: Way, data: Federation, args: argparse.Namespace) -> PRVAccountant:
    """All steps of one way; what they spent."""
    accountant, optimizer = PRVAccountant(), torch.optim.SGD(way.model.parameters(), lr=args.lr, momentum=0.9)
    batches, noise = (torch.Generator().manual_seed(args.seed + k) for k in (1, 2))
    for _ in range(args.steps):
        joins = torch.rand(data.count, generator=batches) < args.rate
        rows = joins[data.users].nonzero().flatten()
        total = way.total(data.images[rows], data.labels[rows], data.users[rows])
        for name, p in way.model.named_parameters():
            drawn = torch.randn(p.shape, generator=noise) * way.noise * way.sensitivity
            p.grad = (total[name] + drawn) / (args.rate * data.count)
        optimizer.step()
        accountant.step(noise_multiplier=way.noise, sample_rate=args.rate)
    return accountant


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Trains in all ways, prints and returns the table."""
    args = arguments(argv)
    data, images, labels = dealt(args.seed)
    sizes = torch.bincount(data.users)
    print(f"{len(data.labels)} digits of {data.count} users, {int(sizes.min())} to {int(sizes.max())} each; "
          f"{args.steps} steps, each user in one with probability {args.rate:g}; σ = {args.noise:g}")  # fmt: skip
    table = {}
    for name, way in ways(args, data.count).items():
        accountant = train(way, data, args)
        with torch.no_grad():
            accuracy = (way.model(images).argmax(1) == labels).float().mean().item()
        table[name] = {"accuracy": accuracy, "ε": accountant.get_epsilon(args.delta) if way.noise else math.inf}
    rows = [[name, f"{row['accuracy']:.1%}", f"{row['ε']:.2f}"] for name, row in table.items()]
    print(f"\nε per user at δ = {args.delta:g}, by the PRV accountant\n")
    print(tabulate(rows, ["way", "accuracy", "ε"], disable_numparse=True, colalign=("left", "right", "right")))
    return table


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="training steps (default 150)")
    parser.add_argument("--rate", type=float, default=0.2, help="probability of a user to be in a batch (default 0.2)")
    parser.add_argument("--noise", type=float, default=1.0, help="noise multiplier σ (default 1)")
    parser.add_argument("--max-norm", type=float, default=4.0, help="clipping norm C of a user (default 4)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD with momentum 0.9 (default 0.1)")
    parser.add_argument("--delta", type=float, default=1e-3, help="δ of the reported ε (default 1e-3)")
    parser.add_argument("--seed", type=int, default=0, help="decides who has what, weights, batches and noise")
    parser.add_argument("--backend", default="inductor", help="as in torch.compile (default inductor)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
