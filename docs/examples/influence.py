"""Which training digits does a prediction rest on? Influence from per-sample gradients, held against retraining.

A multinomial logistic regression is fitted to a few hundred of scikit-learn's digits. Leaving training sample i out
and fitting again changes the loss of test sample j by Δ_ji: the truth, at one fit for each i. To first order

    Δ_ji  ≈  g_j · H⁻¹ g_i        (g: gradients of the samples' losses, H: Hessian of the whole objective)

With H⁻¹ left out these are inner products of gradients. With random projections φ of the gradients, H is a small matrix
(Park et al. 2023, arXiv:2303.14186; Choe et al. 2024, arXiv:2405.13954):

    Δ_ji  ≈  φ_j · K⁻¹ φ_i,   K = Σ_i φ_i φ_iᵀ + λI                     φ of the given labels, or
                              K = Σ_i Σ_y p(y | x_i) φ_iy φ_iyᵀ + λI    φ of all labels, by their probability

The second sum is the Fisher information, which for this model is the Hessian of the losses; the first is its usual
substitute, from one gradient a sample.

    python docs/examples/influence.py

It prints, for each estimate, its rank correlation with the truth over the training samples, averaged over test samples.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import psg_fx
from psg_fx.demo.digits import corrupted_digits

DECAY = 1.0
"""λ of the objective Σ_i loss_i + λ/2 ‖θ‖²."""


def fit(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Minimise the objective from where the model stands, until its gradient vanishes."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=1000, tolerance_grad=1e-8, tolerance_change=0.0, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        loss = loss + DECAY / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample, `[B]`."""
    with torch.no_grad():
        return F.cross_entropy(model(images), labels, reduction="none")


def retrained(model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
    """The truth `[test, train]`: how much each test loss grows when a training sample is left out."""
    before, (images, labels) = losses(model, *test), train
    columns = []
    for i in range(len(labels)):
        kept = torch.arange(len(labels)) != i
        other = copy.deepcopy(model)
        fit(other, images[kept], labels[kept])
        columns.append(losses(other, *test) - before)
    return torch.stack(columns, 1)


def inner_products(model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], backend: str) -> Tensor:
    """⟨g_j, g_i⟩ `[test, train]`, from one Gram matrix of all samples."""
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Gram(), backend=backend)
    gram = step(torch.cat([test[0], train[0]]), torch.cat([test[1], train[1]])).gram
    count = len(test[1])
    return gram[:count, count:]


def projected(
    model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], asked: psg_fx.Projection, backend: str
) -> tuple[Tensor, Tensor, int]:
    """φ_j K⁻¹ φ_i `[test, train]` for both K, and the number of features."""
    step = psg_fx.transform(model, F.cross_entropy, quantities=asked, backend=backend)
    phi, phi_test = step(*train).projection, step(*test).projection
    given = phi.T @ phi
    own = torch.zeros_like(given)
    with torch.no_grad():
        chances = model(train[0]).softmax(1)
    for label, chance in enumerate(chances.T):
        features = step(train[0], torch.full_like(train[1], label)).projection
        own += (chance[:, None] * features).T @ features
    decay = DECAY * torch.eye(len(given), dtype=given.dtype)
    return *(phi_test @ torch.linalg.solve(k + decay, phi.T) for k in (given, own)), len(given)


def rank_correlation(estimate: Tensor, truth: Tensor) -> float:
    """Spearman's ρ over the training samples, averaged over the test samples."""
    a, b = (x.argsort(1).argsort(1).double() for x in (estimate, truth))
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
    return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean().item()


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[int, float, float | None]]:
    """Fits, retrains, estimates, compares; prints and returns the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=int, default=300, help="training digits, each left out once (default 300)")
    parser.add_argument("--test", type=int, default=100, help="test digits (default 100)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="sides of the projections")
    parser.add_argument("--seed", type=int, default=0, help="decides which digits, and the projections")
    parser.add_argument("--backend", default="inductor", help="as in torch.compile (default inductor)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # hundreds of fits with small matrices: threads would wait for each other
    print(f"psg_fx {psg_fx.__version__}, torch {torch.__version__}, Python {platform.python_version()}, float64, "
          f"seed {args.seed}, backend {args.backend}")  # fmt: skip
    digits = corrupted_digits(0.0, args.seed)
    train = digits.images[: args.train].double(), digits.true[: args.train]
    test = digits.test_images[: args.test].double(), digits.test_labels[: args.test]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    fit(model, *train)
    size = sum(p.numel() for p in model.parameters())
    right = (model(test[0]).argmax(1) == test[1]).double().mean().item()
    print(f"\nlogistic regression with {size} parameters on {args.train} digits: "
          f"{right:.0%} of {args.test} test digits are right")  # fmt: skip
    start = time.perf_counter()
    truth = retrained(model, train, test)
    print(f"retrained without each training digit: {args.train} fits in {time.perf_counter() - start:.1f} s")
    rows: dict[str, tuple[int, float, float | None]] = {}
    score = rank_correlation(inner_products(model, train, test, args.backend), truth)
    rows["inner products of gradients"] = size, score, None
    for rank in args.ranks:
        asked = psg_fx.Projection(rank=rank, seed=args.seed)
        given, own, features = projected(model, train, test, asked, args.backend)
        rows[str(asked)] = features, rank_correlation(given, truth), rank_correlation(own, truth)
    print("\nrank correlation with the truth over training digits, mean over test digits (1: same order, 0: chance);")
    print(f"K from the given labels, or from all; rank 64 keeps all {size} entries of a gradient\n")
    columns = ["estimate", "features", "given labels", "all labels"]
    print(tabulate(([name, *row] for name, row in rows.items()), columns, floatfmt=".3f", missingval="-"))
    return rows


if __name__ == "__main__":
    main()
