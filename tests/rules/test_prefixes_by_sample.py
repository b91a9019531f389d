"""Ways from a parameter to its use that `vmap` does not run, and of which kernels read operands as they lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from support import oracle
from support.programs import square


class Made(nn.Module):
    """A weight that layers make of a parameter: their activation's result lies with channels last."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 5, 5))
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), *between, nn.GroupNorm(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layers(self.start).flatten()[:12].view(3, 4)


@pytest.mark.parametrize("between", [(), (nn.Tanh(),), (nn.SiLU(), nn.Conv2d(4, 4, 1))], ids=["plain", "tanh", "twice"])
def test_group_norms_of_convolutions(between: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(0)
    model, x = Made(*between).double(), torch.randn(4, 3, dtype=torch.float64)
    out = psg_fx.transform(model, square, quantities=psg_fx.Grads(), backend="eager")(x)
    losses, grads = oracle.loop_grads(model, square, x, None)
    torch.testing.assert_close(out.losses, losses)
    assert oracle.worst_error(out.grads, grads) < 1e-10
