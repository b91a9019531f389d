"""A parameter in several shapes, and operands without elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

torch.manual_seed(0)


class Tied(nn.Module):
    """A table that is looked up, and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 8) / 8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.table[ids].tanh().sum(1), self.table)


class Grouped(nn.Module):
    """One kernel, all channels at once and in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 4, 3) / 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([x, x.flip(1)], 1)
        return F.conv1d(x, self.kernel, padding=1) + F.conv1d(wide, self.kernel, padding=1, groups=2)


MODELS: list[tuple[Callable[[], nn.Module], Tensor]] = [
    (Tied, torch.randint(50, (5, 3))), (Grouped, torch.randn(5, 4, 6)),
]  # fmt: skip


def loss(output: Tensor) -> Tensor:
    return output.sin().mean()


@pytest.mark.parametrize(("make", "x"), MODELS)
def test_one_parameter_that_two_ops_see_in_two_shapes(make: Callable[[], nn.Module], x: Tensor) -> None:
    model = make()
    (name, weight), *_ = model.named_parameters()
    _, grads = oracle.loop_grads(model, loss, x)
    direction = torch.randn_like(weight)
    step = psg_fx.transform(model, loss, quantities=psg_fx.Dots(), backend="eager")
    found = step(x, directions={name: direction}).dots
    torch.testing.assert_close(found.double(), oracle.dots(grads, {name: direction.double()}), rtol=1e-4, atol=1e-6)
    step = psg_fx.transform(model, loss, quantities=psg_fx.Projection(4), backend="eager")
    assert step.validate(x).ok


@pytest.mark.parametrize("shape", [(4, 0, 5), (4, 3, 5)])
@pytest.mark.parametrize("sizes", [(4, 5), (0, 5)])
def test_plans_of_sequences_and_outputs_without_elements(shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.randn(sizes)), nn.Parameter(torch.randn(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([F.linear(x, self.weight).sum(1), F.linear(x.sum(1) + 1, self.other)], 1)

    model, x = Model(), torch.randn(shape)
    step = psg_fx.transform(model, loss, quantities=psg_fx.Norms())
    torch.testing.assert_close(step(x).norms, oracle.norms(oracle.loop_grads(model, loss, x)[1]).float())
