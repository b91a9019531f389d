"""Samples of which a mask picks no row: what stands for their rows counts nothing, also where it is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads
from support import oracle
from support.programs import square


class Masked(nn.Module):
    """`change(model, h)` of a layer's outputs."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change
        self.scale, self.pair = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([1.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.layer(x))  # type: ignore[no-any-return]


def log_of_some(model: Any, h: Tensor) -> Tensor:
    out, m = torch.zeros_like(h), h > 1
    out[m] = torch.log(h[m] - 1) * model.scale
    return out


def root_of_some(model: Any, h: Tensor) -> Tensor:
    out, m = torch.zeros_like(h), h > 1
    out[m] = torch.sqrt(h[m] * model.scale - 1)
    return out


def two_of_some(model: Any, h: Tensor) -> Tensor:
    """An op with a parameter that has two results."""
    out, m = torch.zeros_like(h), h > 1
    least, place = (torch.log(h[m][:, None] - 1) * model.pair).min(1)
    out[m] = torch.log(least + 9) + place
    return out


def sum_of_some(model: Any, h: Tensor) -> Tensor:
    m = h > 1
    return h.sum(-1) + torch.zeros_like(h).masked_scatter(m, torch.log(h[m] - 1) * model.scale).sum(-1)


@pytest.mark.parametrize("change", [log_of_some, root_of_some, two_of_some, sum_of_some], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0], [0, 1]], ids=["some", "alone", "none"])
def test_samples_without_rows_where_nothing_is_finite(change: Any, rows: list[int]) -> None:
    model = Masked(change).double()
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(3, 4))
        model.layer.bias.zero_()
    x = torch.tensor([[0.2, 0.1, 0, 0], [-1, -2, 0.5, 0], [2.5, 0, 3, 1], [0, 4, 0, 1]], dtype=torch.float64)[rows]
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    oracle.check_call(step, model, square, x)
