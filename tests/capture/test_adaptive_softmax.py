"""`nn.AdaptiveLogSoftmaxWithLoss`, which takes the rows of each cluster of classes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from support import oracle

DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 5, 3, generator=DRAWS, dtype=torch.float64), torch.randint(20, (4, 5), generator=DRAWS)


class Language(nn.Module):
    """Tokens of a sample, or one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.softmax = nn.Linear(3, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 20, [4, 10], **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        out: Tensor = self.softmax(h.flatten(0, -2), y.flatten()).output
        return out.view(y.shape)


def mean(out: Tensor) -> Tensor:
    return -out.mean()


@pytest.mark.parametrize("options", [{}, {"head_bias": True, "div_value": 2.0}], ids=["plain", "options"])
@pytest.mark.parametrize("tokens", [True, False])
def test_exact(tokens: bool, options: dict[str, Any]) -> None:
    model = Language(**options).double()
    step = psg_fx.transform(model, mean, quantities=psg_fx.Grads(), backend="eager")
    for size in (4, 1):
        inputs = (X[:size], Y[:size]) if tokens else (X[:size, 0], Y[:size, 0])
        losses, grads = oracle.loop_grads(model, mean, inputs)
        out = step(inputs)
        torch.testing.assert_close(out.losses, losses)
        assert oracle.worst_error(out.grads, grads) < 1e-12


def test_a_loss_of_its_own_and_one_place() -> None:
    model = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [4, 10]).double()
    x = torch.randn(4, 16, dtype=torch.float64)
    step = psg_fx.transform(model, lambda out: out.loss, quantities=psg_fx.Grads(), backend="eager")
    _, grads = oracle.loop_grads(model, lambda out: out.loss, (x, Y[:, 0]))
    assert oracle.worst_error(step((x, Y[:, 0])).grads, grads) < 1e-12


@pytest.mark.parametrize("wrong", [20, -1])
def test_targets_that_are_no_class_are_refused(wrong: int) -> None:
    step = psg_fx.transform(Language().double(), mean, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(psg_fx.BadArgument, match="refuses these values"):
        step((X, Y.masked_fill(Y[1, 2] == Y, wrong)))
