"""Groups of samples that are rows, against sums of single samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import psg_fx
from support import oracle
from support.expected import compare
from support.rows_of_samples import Batch, RowsTruth, everything, run

Given = tuple[Batch, list[int], int | None]
"""A batch, the group of each sample, and how many groups there are."""


class GroupTruth(RowsTruth):
    """What quantities should be of groups of a batch's samples."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], given: Given) -> None:
        batch, ids, count = given
        super().__init__(model, loss_fn, batch)
        total = max(ids) + 1 if count is None else count
        self.samples, whose = self.grads, torch.tensor(ids)
        self.grads = {n: torch.stack([g[whose == u].sum(0) for u in range(total)]) for n, g in self.samples.items()}
        self.norms, self.own = oracle.norms(self.grads), oracle.parameter_norms(self.grads)
        self.bound = 0.7 * self.norms.max().item() + 1e-3
        self.weights = torch.linspace(-1, 2, total, dtype=torch.float64)

    def expected(self, field: str, quantity: Any) -> Tensor | dict[str, Tensor]:
        return oracle.mean_grad(self.samples) if field == "mean_grad" else super().expected(field, quantity)


def check(model: nn.Module, loss_fn: Callable[..., Tensor], many: list[Given], asked: list[Any] | None = None) -> Any:
    """Every quantity of groups of every batch; one step serves all.  Returns the step."""
    truths = [GroupTruth(model, loss_fn, given) for given in many]
    quantities = everything(truths[0].bound) if asked is None else asked
    step = psg_fx.transform(model, loss_fn, batch_dim=many[0][0].batch_dim, quantities=quantities, backend="eager")
    for (batch, ids, count), truth in zip(many, truths, strict=True):
        compare(run(step, batch, truth, groups=ids, num_groups=count), truth, quantities, 1e-10)
    return step
