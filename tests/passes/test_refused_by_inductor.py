"""What inductor refuses is compiled in another way where there is one: without subgraphs, or for sizes as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import psg_fx
from psg_fx import Grads, Norms
from psg_fx.passes.compile import compile as compile_
from psg_fx.passes.compile.calls import invoke_subgraph
from psg_fx.torch_private.inductor import InductorError
from support import oracle

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.gelu(self.one(self.norm(x))))


def refusing(monkeypatch: pytest.MonkeyPatch, what: Any) -> list[bool]:
    """In inductor's place a compiler that refuses the graphs and inputs of which `what` is true; whether, in turn."""
    asked: list[bool] = []

    def compiler(gm: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
        asked.append(what(gm, inputs))
        if asked[-1]:
            raise InductorError(AssertionError("not so"), None)
        return gm

    monkeypatch.setattr(compile_, "inductor", lambda options: compiler)
    return asked


def has_calls(gm: GraphModule, inputs: Sequence[Tensor]) -> bool:
    return any(node.target is invoke_subgraph for node in gm.graph.nodes)


def has_symbols(gm: GraphModule, inputs: Sequence[Tensor]) -> bool:
    return any(isinstance(size, torch.SymInt) for value in inputs for size in value.shape)


def check(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = step(x, y)
    _, want = oracle.loop_grads(model, F.cross_entropy, x, y)
    assert oracle.worst_error(out.grads, want) < 1e-5


def test_subgraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(4)])
    asked = refusing(monkeypatch, has_calls)
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), Norms()])
    check(step, model, torch.randn(3, WIDTH), torch.arange(3))
    assert asked == [True, False]


def test_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes are compiled as numbers; after the first refusal none is tried as a symbol."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 3)
    asked = refusing(monkeypatch, has_symbols)
    step = psg_fx.transform(model, F.cross_entropy, quantities=Grads())
    check(step, model, torch.randn(4, WIDTH), torch.arange(4) % 3)
    with pytest.warns(UserWarning, match="compiled for each batch size by itself"):
        check(step, model, torch.randn(5, WIDTH), torch.arange(5) % 3)
    for size in (6, 5, 4):
        check(step, model, torch.randn(size, WIDTH), torch.arange(size) % 3)
    assert asked == [False, True, False, False]


@pytest.mark.slow
@pytest.mark.inductor
def test_an_index_of_which_nothing_is_known() -> None:
    """Torch 2.13 fails on the indices of this padding, in sizes that are numbers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.conv = nn.Conv1d(1, 1, 3, padding=1, padding_mode="replicate")

        def forward(self, x: Tensor) -> Tensor:
            scaled = F.instance_norm(x.movedim(2, 0), weight=self.scale, bias=self.scale)
            found: Tensor = self.conv(scaled.unflatten(1, (1, 1)).reshape(x.shape[2], 1, 9))
            return found.sin().flatten(1)

    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(1, 3, 2, 3), torch.arange(2)
    step = psg_fx.transform(model, F.cross_entropy, quantities=Grads(), batch_dim=(2, 0))
    _, want = oracle.loop_grads(model, F.cross_entropy, x, y, batch_dim=(2, 0))
    assert oracle.worst_error(step(x, y).grads, want) < 1e-5
