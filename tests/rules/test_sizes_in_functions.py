"""Custom functions that ask what a batch of one sample answers otherwise, of which no op of their graphs is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, NotYetSupported
from support import oracle

Asked = Callable[[Tensor], Any]


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, asked: Asked) -> Tensor:
        ctx.save_for_backward(y)
        ctx.asked = asked
        return x * torch.where(y == 2, asked(x), 1)[:, None]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return g * torch.where(y == 2, ctx.asked(g), 1)[:, None], None, None


class Backward(Forward):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, asked: Asked) -> Tensor:
        ctx.save_for_backward(y)
        ctx.asked = asked
        return x.clone()


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function], asked: Asked) -> None:
        super().__init__()
        self.linear, self.function, self.asked = nn.Linear(4, 3), function, asked

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function.apply(self.linear(x), y, self.asked)  # type: ignore[no-any-return, no-untyped-call]


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


UNLIKE: dict[str, Asked] = {
    "chunk": lambda g: len(g.chunk(2)),
    "slice": lambda g: g[:2].shape[0],
    "squeeze": lambda g: g.squeeze().dim(),
}
ALIKE: dict[str, Asked] = {
    "a slice of steps": lambda g: g[:, :2].shape[1],
    "chunks of steps": lambda g: len(g.chunk(2, 1)),
    "a dim": lambda g: g.unsqueeze(1).squeeze(1).dim(),
}


@pytest.mark.parametrize("function", [Forward, Backward])
@pytest.mark.parametrize("name", UNLIKE)
def test_refused(function: type[torch.autograd.Function], name: str) -> None:
    step = psg_fx.transform(Net(function, UNLIKE[name]).double(), loss, quantities=Grads(), backend="eager")
    with pytest.raises(NotYetSupported):
        step((torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 1, 0])))


@pytest.mark.parametrize("function", [Forward, Backward])
@pytest.mark.parametrize("name", ALIKE)
def test_answered(function: type[torch.autograd.Function], name: str) -> None:
    model = Net(function, ALIKE[name]).double()
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    given = torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 1, 2])
    _, want = oracle.loop_grads(model, loss, given)
    assert oracle.worst_error(step(given).grads, want) < 1e-10
