"""Samples that are rows: batches of them, each sample by itself, and what a step must say of both.

The truth is a float64 loop over samples, each alone: its own rows, pointers renumbered, ids all zero.  The second
opinion is autograd's gradient of each of the losses of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum
from support import oracle
from support.expected import Truth, compare, directions


@dataclass(frozen=True)
class Part:
    """Inputs and targets of one call."""

    inputs: Any
    targets: Any

    def losses(self, model: nn.Module, loss_fn: Callable[..., Tensor]) -> Tensor:
        """What model and loss give."""
        named = isinstance(self.inputs, dict), isinstance(self.targets, dict)
        out = model(**self.inputs) if named[0] else model(*self.inputs)
        return loss_fn(out, **self.targets) if named[1] else loss_fn(out, *self.targets)


@dataclass(frozen=True)
class Batch:
    """A batch of `count` samples, each of them alone, and where its rows lie."""

    whole: Part
    alone: tuple[Part, ...]
    batch_dim: Any

    @property
    def count(self) -> int:
        return len(self.alone)


def ids_of(sizes: list[int], order: str) -> Tensor:
    """The sample of each row; order: "sorted" or "shuffled"."""
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    return ids if order == "sorted" else ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]


def renumbered(pointers: Tensor, own: Tensor) -> Tensor:
    """Numbers of rows, as numbers among the rows of `own` (True for those)."""
    return (own.cumsum(0) - 1)[pointers]


class RowsTruth(Truth):
    """What quantities should be of a batch."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], batch: Batch) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        losses, found = [], []
        for part in batch.alone:
            loss = part.losses(model, loss_fn).sum()
            losses.append(loss.detach())
            found.append(gradient(loss, named))
        self.losses = torch.stack(losses)
        self.grads = {n: torch.stack([g[n] for g in found]) for n in named}
        self.norms, self.own = oracle.norms(self.grads), oracle.parameter_norms(self.grads)
        self.bound = 0.7 * self.norms.median().item() + 1e-3
        self.weights = torch.linspace(-1, 2, batch.count, dtype=torch.float64)


def gradient(loss: Tensor, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Of one loss, zeros where it does not reach a parameter."""
    if not loss.requires_grad:
        return {n: torch.zeros_like(p) for n, p in named.items()}
    found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def everything(bound: float) -> list[Any]:
    return [
        Grads(), Norms(), ClippedSum(bound), WeightedSum(), MeanGrad(), Dots(count=2), Gram(), SecondMoment(),
        Projection(rank=2),
    ]  # fmt: skip


def usual(bound: float = 0.5) -> list[Any]:
    """What is asked where another test crosses the same rules with every quantity."""
    return [Grads(), Norms(), ClippedSum(bound)]


def check(
    model: nn.Module, loss_fn: Callable[..., Tensor], batches: list[Batch], *, tolerance: float = 1e-10,
    quantities: list[Any] | None = None, captures: int | None = 1, **options: Any,
) -> Any:  # fmt: skip
    """Every quantity of every batch is that of the loop over samples; one step serves all batches.

    captures: how many graphs that takes, None for any number (very uneven samples stay where they lie, by another).

    Returns the step.
    """
    truths = [RowsTruth(model, loss_fn, batch) for batch in batches]
    asked = everything(truths[0].bound) if quantities is None else quantities
    step = psg_fx.transform(
        model, loss_fn, batch_dim=batches[0].batch_dim, quantities=asked, **{"backend": "eager"} | options
    )
    for batch, truth in zip(batches, truths, strict=True):
        out = run(step, batch, truth)
        compare(out, truth, asked, tolerance)
        agree(model, loss_fn, batch, truth)
    assert captures is None or len(step.captures) == captures
    return step


def run(step: Any, batch: Batch, truth: RowsTruth, **more: Any) -> Any:
    given: dict[str, Any] = {}
    for quantity in step.quantities:
        if "weights" in quantity.reads:
            given["weights"] = truth.weights
        if "directions" in quantity.reads:
            given["directions"] = directions(truth.grads, quantity.count)
    return step(batch.whole.inputs, batch.whole.targets, **given, **more)


def agree(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Batch, truth: RowsTruth) -> None:
    """The second opinion: where the loss is one for each sample, autograd's gradient of each."""
    losses = batch.whole.losses(model, loss_fn)
    if losses.ndim != 1:
        return
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for b, loss in enumerate(losses):
        for n, g in gradient(loss, named).items():
            torch.testing.assert_close(g, truth.grads[n][b], atol=1e-10, rtol=1e-10)
