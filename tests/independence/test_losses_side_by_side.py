"""Losses that a model returns beside its output, as tensors of more than a number: `[1]`, or several in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, SamplesMixed
from support import oracle

Aside = Callable[[Tensor, Tensor], Tensor]


class TwoLosses(nn.Module):
    """`aside(a, b)` of two losses that are means over the batch."""

    def __init__(self, aside: Aside) -> None:
        super().__init__()
        self.first, self.last, self.aside = nn.Linear(4, 4), nn.Linear(4, 4), aside

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        out = self.last(h)
        return out, self.aside(F.mse_loss(h, x), F.mse_loss(out, x))


ASIDE: list[Aside] = [
    lambda a, b: a[None],
    lambda a, b: torch.stack([a, b]),
    lambda a, b: torch.zeros(1, dtype=a.dtype) + a,
    lambda a, b: torch.cat([a.view(1), 2 * b.view(1)]).expand(3, 2),
]


def loss_fn(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], targets) + 0.1 * outputs[1].sum()


@pytest.mark.parametrize("aside", ASIDE)
def test_gradients(aside: Aside) -> None:
    torch.manual_seed(0)
    model, x = TwoLosses(aside).double(), torch.randn(3, 4, dtype=torch.float64)
    step = psg_fx.transform(model, loss_fn, quantities=Grads(), backend="eager")
    for count in (3, 1):
        found, grads = oracle.check_call(step, model, loss_fn, x[:count], x[:count])
        assert oracle.worst_error(found.grads, grads) < 1e-12


def test_without_a_loss_they_are_of_no_sample() -> None:
    with pytest.raises(SamplesMixed, match=r"test_losses_side_by_side\.py"):
        psg_fx.transform(TwoLosses(ASIDE[1]), backend="eager")(torch.randn(3, 4))


def test_a_value_of_all_samples_is_none() -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.layer(x)
            return h, h.max(0).values

    with pytest.raises(SamplesMixed, match=r"leaves the model with shape \(4,\)"):
        psg_fx.transform(Largest(), loss_fn, backend="eager")(torch.randn(3, 4), torch.randn(3, 4))
