"""Names of a model's parts are the model's: those that a step calls its own fields by are as good as others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.step.module import _declared
from support import oracle

X, Y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1])


def fields(loss_fn: object) -> list[str]:
    """What a step calls its own, apart from what every module has."""
    step = psg_fx.transform(nn.Linear(3, 3), loss_fn, backend="eager")
    found = sorted(vars(step).keys() - vars(nn.Module()).keys())
    assert set(found) <= _declared(type(step)), "a field that is not declared"
    return found


class Named(nn.Module):
    """A model whose parts have these names: modules, or a parameter or buffer for each."""

    def __init__(self, names: list[str], kind: str) -> None:
        super().__init__()
        self.names, self.kind, self.first = names, kind, nn.Linear(3, 3).double()
        for name in names:
            if kind == "modules":
                self.add_module(name, nn.Linear(3, 3).double())
            elif kind == "parameters":
                self.register_parameter(name, nn.Parameter(torch.randn(3, dtype=torch.float64)))
            else:
                self.register_buffer(name, torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.names:
            part = getattr(self, name)
            x = x + (part(x).tanh() if self.kind == "modules" else part)
        return x


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, None])
@pytest.mark.parametrize("kind", ["modules", "parameters", "buffers"])
def test_names_of_fields(kind: str, loss_fn: Callable[..., torch.Tensor] | None) -> None:
    torch.manual_seed(0)
    model = Named(fields(loss_fn), kind)
    before = dict(model.state_dict(keep_vars=True))
    step = psg_fx.transform(model, loss_fn, backend="eager")
    for size in (4, 2):
        x, y = X[:size], Y[:size]
        _, truth = oracle.loop_grads(model, F.cross_entropy, x, y)
        if loss_fn is not None:
            found = step(x, y).grads
        else:
            F.cross_entropy(step(x), y, reduction="sum").backward()
            found = {name: p.grad_sample for name, p in model.named_parameters()}
            for p in model.parameters():
                del p.grad_sample
        assert oracle.worst_error(found, truth) < 1e-12
    after = dict(model.state_dict(keep_vars=True))
    assert before.keys() == after.keys()
    assert all(after[name] is value for name, value in before.items())
    assert dict(step.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_parts_by_dotted_names() -> None:
    """That begin as a field of the step is called, as those of many language models do."""
    model = nn.Module()
    model.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    assert all(step.get_parameter(name) is p for name, p in step.named_parameters())
    assert all(step.get_buffer(name) is b for name, b in step.named_buffers())
    assert step.get_submodule("model.0") is model.model[0]
    assert step.get_submodule("") is step
