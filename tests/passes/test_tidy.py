"""What is computed once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import psg_fx
from support import oracle


def test_zeros_of_both_signs_are_two_numbers() -> None:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        up, down = torch.copysign(out, 0.0), torch.copysign(out, -0.0)
        return (up * target + down.exp()).sum(1)

    model, x, y = nn.Linear(4, 3).double(), torch.randn(5, 4).double(), torch.randn(5, 3).double()
    out = psg_fx.transform(model, loss, backend="eager")(x, y)
    losses, grads = oracle.loop_grads(model, loss, x, y)
    assert oracle.relative_error(out.losses, losses) < 1e-12
    assert oracle.worst_error(out.grads, grads) < 1e-12
