"""Numbers that torch itself reads out of tensors, given in the place of numbers: another value is another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

X = torch.randn(4, 5, dtype=torch.float64)


class Model(nn.Module):
    def __init__(self, after: Callable[[Any, Tensor], Tensor], number: Tensor) -> None:
        super().__init__()
        self.layer, self.after, self.number = nn.Linear(5, 4).double(), after, number

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.layer(x))


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * float(ctx.model.number), None


READ: dict[str, tuple[Callable[[Any, Tensor], Tensor], float, float]] = {
    "a column": (lambda m, h: h[:, m.number.long()], 1, 2),
    "a slope": (lambda m, h: F.leaky_relu(h, m.number), 0.1, 0.5),
    "how many": (lambda m, h: h.topk(m.number.long(), 1).values, 1, 2),
    "a list of numbers": (lambda m, h: h * torch.tensor([m.number, 1, 2, 3]), 1, 2),
    "a text": (lambda m, h: h * float(str(m.number)[7:].split(",")[0].rstrip(")")), 1.5, 2.25),
    "memory": (lambda m, h: h * float(np.from_dlpack(m.number)), 1.5, 2.25),
    "in a backward pass": (lambda m, h: Scaling.apply(h, m), 1.5, 2.25),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("in_place", [True, False])
def test_another_value_is_seen(name: str, in_place: bool) -> None:
    after, first, second = READ[name]
    model = Model(after, torch.tensor(first, dtype=torch.float64))

    def loss(output: Tensor) -> Tensor:
        return output.sin().sum()

    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    oracle.check_batches(step, model, loss, X, (), (4,))
    if in_place:
        model.number.fill_(second)
    else:
        model.number = torch.full_like(model.number, second)
    oracle.check_batches(step, model, loss, X, (), (4, 4))
    assert len(step.captures) == 2
