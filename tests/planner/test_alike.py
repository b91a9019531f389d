"""Layers that are alike are searched once, and have the trees that a search of their own finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import psg_fx
from psg_fx import zoo
from psg_fx.planner import search
from psg_fx.planner.plan import PLAN, Plan

MANY = [
    psg_fx.ClippedSum(max_norm=1.0), psg_fx.Gram(), psg_fx.SecondMoment(), psg_fx.Projection(rank=4), psg_fx.Norms(),
]  # fmt: skip


class Tied(nn.Module):
    """Layers that are alike but for what they share: the second and third have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[2].weight = self.layers[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.layers[0](x).sum(1)


def planned(model: nn.Module, loss: Any, x: Any, y: Any, dim: Any = 0) -> Plan:
    step = psg_fx.transform(model, loss, quantities=MANY, backend="eager", progress=False, batch_dim=dim)
    step(x, y)
    return PLAN.of(step.graphs["planned"])


def of_example(name: str, **sizes: Any) -> Callable[[], Plan]:
    example = zoo.example(name, 3, **sizes)
    return lambda: planned(example.model, example.loss_fn, example.inputs, example.targets, example.batch_dim)


def tied() -> Plan:
    torch.manual_seed(0)
    return planned(Tied(), lambda out, y: (out - y).square().sum(1), torch.rand(3, 5, 6), torch.rand(3, 6))


MODELS = {
    "gpt": of_example("gpt", layers=3, width=16, heads=2, tokens=8, vocabulary=20),
    "resnet18gn": of_example("resnet18gn"), "tied": tied,
}  # fmt: skip


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every network whose trees are searched."""
    found: list[Any] = []
    trees: Callable[..., Any] = search._trees
    monkeypatch.setattr(search, "_trees", lambda *args: found.append(args) or trees(*args))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_as_if_each_had_been_searched(name: str, searches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found, few = MODELS[name](), len(searches)
    searches.clear()
    number = itertools.count()
    monkeypatch.setattr(search, "likeness", lambda networks, concrete: next(number))
    alone = MODELS[name]()
    assert few < len(searches)
    assert found.seconds == alone.seconds
    for one, other in zip(found.parameters, alone.parameters, strict=True):
        assert (one.total, one.seconds, one.why) == (other.total, other.seconds, other.why)
        for a, b in zip(one.parts, other.parts, strict=True):
            assert (str(a.tree), a.seconds) == (str(b.tree), b.seconds)
            assert list(a.tree.nodes) == list(b.tree.nodes)  # numbers that a process gives to equal tensors
            assert [(str(tree), s) for tree, s in a.alternatives] == [(str(tree), s) for tree, s in b.alternatives]
