"""Models that decide or pick by tensors that are no small buffers: frozen parameters, attributes, masks of numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 1])


class Curved(nn.Module):
    """Decides by a number that a frozen parameter holds, as hyperbolic layers do by their curvature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()
        self.curvature = nn.Parameter(torch.tensor(1.0, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        k = -F.softplus(self.curvature) + 1
        h = self.layer(x)
        return h if torch.all(k.isclose(k.new_tensor(0.0))) else h.tanh() * k.sign()


def test_a_frozen_parameter_decides() -> None:
    model = Curved()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for value in (1.0, math.log(math.expm1(1.0)), -1.0):
        model.curvature.data.fill_(value)
        assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12


class Listed(nn.Module):
    """Decides by a tensor that is no buffer, as TabNet does by which columns are continuous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.some = nn.Linear(4, 4).double(), torch.tensor([True, False])

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h if self.some[1] else 2 * h


def test_a_tensor_that_is_no_buffer_decides() -> None:
    model = Listed()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")

    def check() -> None:
        assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12

    check()
    model.some[1] = True
    check()
    model.some.numpy()[1] = False
    check()


def test_a_tensor_that_is_no_buffer_is_another() -> None:
    model = Listed()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for some in ([True, False], [False, True]):
        model.some = torch.tensor(some)
        assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12


class Masked(nn.Module):
    """A mask of numbers picks entries of a weight, as autoregressive blocks do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(size, size, dtype=torch.float64))
        self.register_buffer("mask", torch.eye(size))

    def forward(self, x: Tensor) -> Tensor:
        picked = self.weight[self.mask.bool()].view(len(self.weight))
        return x * picked[:4] + picked[4:].sum()


def test_a_mask_of_numbers_picks() -> None:
    model = Masked(12)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for mask in (torch.eye(12), torch.eye(12).flip(0)):
        model.mask.copy_(mask)
        assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12


def test_a_mask_that_is_too_large_is_refused_in_psg_fx_own_words() -> None:
    step = psg_fx.transform(Masked(65), F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match=r"depends on values") as caught:
        step(X, Y)
    assert "While executing" not in str(caught.value)


class LeftOut(nn.Module):
    """Leaves a layer out with a probability, as encoders do in training."""

    def __init__(self, probability: float, keeps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.probability, self.keeps = nn.Linear(4, 4).double(), probability, keeps

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(1)
        is_left_out = not drawn >= self.probability if self.keeps else drawn.lt(self.probability).any()
        return x * self.layer.bias if is_left_out else self.layer(x)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("probability", [0.0, 1.0, 0])
def test_a_random_number_decides_where_all_decide_alike(probability: float, keeps: bool) -> None:
    model = LeftOut(probability, keeps)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for _ in range(2):
        torch.manual_seed(3)
        found = step(X, Y).grads
        after = torch.rand(1)
        torch.manual_seed(3)
        model(X)
        assert torch.equal(after, torch.rand(1))
        assert oracle.worst_error(found, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12


@pytest.mark.parametrize("probability", [0.1, 5e-324])
def test_a_random_number_that_decides_is_refused(probability: float) -> None:
    step = psg_fx.transform(LeftOut(probability, False), F.cross_entropy, backend="eager")
    with pytest.raises(psg_fx.CaptureFailed, match="the code branches on values of a tensor"):
        step(X, Y)


class Adapted(nn.Module):
    """Left out where a random number is zero, as adapters of rank-r products are: `torch.rand(1) > module_dropout`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.more = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h + self.more(x) if torch.rand(1, dtype=torch.float16) > 0 else h


def test_a_random_number_is_not_zero() -> None:
    """Of float16 there are 2^11, so that one of few seeds draws a zero."""
    model = Adapted()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12

    def drawn(seed: int) -> float:
        torch.manual_seed(seed)
        return torch.rand(1, dtype=torch.float16).item()

    torch.manual_seed(next(seed for seed in range(100_000) if drawn(seed) == 0))
    with pytest.raises(psg_fx.BadArgument, match=r"a random number is exactly zero(?s:.*)torch\.rand\(1"):
        step(X, Y)
    step(X, Y)


class Counted(nn.Module):
    """Decides by whole numbers that it reads out of buffers, as libraries do by `self.initialised.item()`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()
        self.register_buffer("initialised", torch.tensor(0))
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if not self.initialised.item():
            h = h * 2
        if self.step.item() + 1 > 3 and self.step.item() % 2 == 1:
            h = h.tanh()
        return h


@pytest.mark.filterwarnings("ignore:captured for the third time")
def test_numbers_of_buffers_decide() -> None:
    model = Counted()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    captures = []
    for initialised, number in ((0, 0), (1, 0), (1, 2), (1, 3), (1, 5), (1, 4)):
        model.initialised.fill_(initialised)
        model.step.fill_(number)
        assert oracle.worst_error(step(X, Y).grads, oracle.loop_grads(model, F.cross_entropy, X, Y)[1]) < 1e-12
        captures.append(len(step.captures))
    assert captures == [1, 2, 2, 3, 3, 4]
