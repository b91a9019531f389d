"""Parameters and modules that code puts in the place of others are refused, and are as they were; modes are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported

X = torch.randn(4, 5)


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Any = None


class Model(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.change, self.frozen = change, Frozen()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        self.change(self, h)
        return h


def swap_modules(m: Any, h: Tensor) -> None:
    m.a, m.b = m.b, m.a


def swap_parameters(m: Any, h: Tensor) -> None:
    m.a.weight, m.b.weight = m.b.weight, m.a.weight


def new_parameter(m: Any, h: Tensor) -> None:
    m.a.weight = nn.Parameter(m.a.weight.detach().clamp(-0.2, 0.2))


def no_bias(m: Any, h: Tensor) -> None:
    m.a.bias = None


def another_module(m: Any, h: Tensor) -> None:
    m.a = nn.Identity()


def no_module(m: Any, h: Tensor) -> None:
    del m.a


@pytest.mark.parametrize("change", [swap_modules, swap_parameters, new_parameter, no_bias, another_module, no_module])
def test_replacing_members(change: Callable[[Any, Tensor], None]) -> None:
    model = Model(change)
    members = dict(model.named_parameters()), dict(model.named_modules())
    with pytest.raises(NotYetSupported, match=r"the code replaces (Model.a|Linear.weight|Linear.bias) as it runs"):
        psg_fx.transform(model, lambda o: o.sum(), backend="eager")(X)
    for before, after in zip(members, (dict(model.named_parameters()), dict(model.named_modules())), strict=True):
        assert list(before) == list(after)
        assert all(after[name] is held for name, held in before.items())


def evaluate(m: Any, h: Tensor) -> None:
    m.norm.eval()


def write_frozen(m: Any, h: Tensor) -> None:
    object.__setattr__(m.frozen, "h", h.detach())


@pytest.mark.parametrize("change", [evaluate, write_frozen])
def test_what_a_forward_pass_leaves(change: Callable[[Any, Tensor], None]) -> None:
    model = Model(change)
    ordinary = copy.deepcopy(model)
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    for factor in (1, 2):
        step(factor * X), ordinary(factor * X)
        assert model.norm.training is ordinary.norm.training
        torch.testing.assert_close(model.frozen.h, ordinary.frozen.h)


class TwoNames(nn.Module):
    """A layer under two names, as an attribute and in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(5, 5), nn.ReLU()
        self.alias, self.both = self.a, nn.Sequential(self.a, self.act, self.a)

    def forward(self, x: Tensor) -> Tensor:
        self.act = nn.Tanh() if self.training else self.act
        return self.both(self.alias(x))


def test_members_with_two_names_are_not_replaced_and_layers_without_tensors_may_be() -> None:
    model = TwoNames()
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    torch.testing.assert_close(step(X).losses.sum(), model(X).sum())
