"""The gradient of what `gather` picks: compared where it is read, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum
from psg_fx.errors import PsgError
from support import oracle

aten = torch.ops.aten


def scatters(step: psg_fx.PerSampleModule) -> int:
    return sum(node.target is aten.scatter_add.default for node in step.graphs["tidied"].graph.nodes)


class Tokens(nn.Module):
    """Logits [B, C, T] of sequences, or [B, C]."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat, self.linear = flat, nn.Linear(3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.linear(x)
        return h.mean(1) if self.flat else h.mT


@pytest.mark.parametrize("flat", [True, False], ids=["samples", "sequences"])
def test_a_classifier_scatters_nothing(flat: bool) -> None:
    torch.manual_seed(0)
    model, x = Tokens(flat).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    y = torch.randint(6, (4,) if flat else (4, 5))
    if not flat:
        y[1, 2] = -100
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.1), backend="eager", dynamic=True)
    for batch in (4, 1):
        out = step(x[:batch], y[:batch])
        _, grads = oracle.loop_grads(model, F.cross_entropy, x[:batch], y[:batch])
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-12
    assert scatters(step) == 0


def test_two_losses_share_the_places_of_their_classes() -> None:
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target) + F.cross_entropy(logits.flip(1), target)

    torch.manual_seed(0)
    model, x = Tokens(True).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    y = torch.randint(6, (4,))
    step = psg_fx.transform(model, loss, quantities=ClippedSum(0.1), backend="eager")
    out, (_, grads) = step(x, y), oracle.loop_grads(model, loss, x, y)
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-12
    assert scatters(step) == 0


def test_a_number_that_no_class_has_is_refused() -> None:
    step = psg_fx.transform(Tokens(True), F.cross_entropy, quantities=ClippedSum(0.1), backend="eager")
    x, y = torch.randn(4, 5, 3), torch.tensor([0, 1, 2, 6])
    with pytest.raises((IndexError, RuntimeError, PsgError)):
        step(x, y)


class OneHot(nn.Module):
    """Shows one number of each row, whose place nothing is picked by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = (x[:, :1] > 0).long()
        return torch.zeros_like(x).scatter_add(1, place, x[:, :1]) * self.linear(x)


def test_what_is_scattered_by_other_numbers_stays() -> None:
    def loss(prediction: torch.Tensor, target: torch.Tensor) -> Any:
        return F.mse_loss(prediction, target)

    torch.manual_seed(0)
    model, x, y = OneHot().double(), torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    step = psg_fx.transform(model, loss, quantities=ClippedSum(0.1), backend="eager")
    out = step(x, y)
    _, grads = oracle.loop_grads(model, loss, x, y)
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-12
    assert scatters(step) == 1
