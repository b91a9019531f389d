"""To the code that is captured, parameters and buffers are the user's own objects, as when it runs by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 3, dtype=torch.float64, generator=GENERATOR), torch.tensor([0, 2, 1, 1])


class Anchor(nn.Parameter):
    """A class of the user's."""


class Scaled(nn.Module):
    """A linear layer and a buffer; its output is twice as large where `asks` says so."""

    def __init__(self, asks: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.asks = nn.Linear(3, 3).double(), asks
        self.anchor = Anchor(torch.randn(3, dtype=torch.float64))
        self.register_buffer("steps", torch.ones((), dtype=torch.float64))
        self.listed, self.ids = [self.layer.weight, self.steps], {id(self.layer.weight), id(self.steps)}
        self.table = {self.layer.bias: 2.0}
        self.layer.weight.decays = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.anchor * self.steps
        return out * 2 if self.asks(self) else out


ASKED: dict[str, Callable[[Any], Any]] = {
    "a parameter in a list": lambda m: m.layer.weight is m.listed[0],
    "a buffer in a list": lambda m: m.steps is m.listed[1],
    "its identity": lambda m: id(m.layer.weight) in m.ids and id(m.steps) in m.ids,
    "a key": lambda m: m.table.get(m.layer.bias),
    "in a set": lambda m: m.layer.weight in set(m.parameters()),
    "its class": lambda m: isinstance(m.anchor, Anchor) and type(m.layer.weight) is nn.Parameter,
    "an attribute": lambda m: getattr(m.layer.weight, "decays", False) and not hasattr(m.layer.bias, "decays"),
    "after a write": lambda m: [m.steps.add_(0.0)] and m.steps is m.listed[1],
    "what a write returns": lambda m: m.steps.mul_(1.0) is m.listed[1],
}


def check(step: psg_fx.PerSampleModule, model: nn.Module, loss: Any = F.cross_entropy) -> None:
    found = step(X, Y)
    _, truth = oracle.loop_grads(model, loss, X, Y)
    assert oracle.worst_error(found.grads, truth) < 1e-12


@pytest.mark.parametrize("name", ASKED)
def test_asked(name: str) -> None:
    model = Scaled(ASKED[name])
    _, truth = oracle.loop_grads(Scaled(lambda m: True), F.cross_entropy, X, Y)
    assert torch.equal(model(X), Scaled(lambda m: True)(X))
    found = psg_fx.transform(model, F.cross_entropy, backend="eager")(X, Y)
    assert oracle.worst_error(found.grads, truth) < 1e-12


def test_an_attribute_that_changes() -> None:
    """What the user says of a parameter later counts from then on."""
    model = Scaled(lambda m: False)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        decays = [p.square().sum() for p in model.parameters() if getattr(p, "decays", False)]
        return F.cross_entropy(out, y) + 0.1 * sum(decays)

    step = psg_fx.transform(model, loss, backend="eager")
    check(step, model, loss)
    model.layer.bias.decays = True  # type: ignore[assignment]
    check(step, model, loss)
    step(X, Y)
    assert len(step.captures) == 2


def test_the_state_of_an_optimizer() -> None:
    """A loss that reads it leaves nothing of the capture there: `state` makes an entry for what it does not know."""
    model = nn.Linear(3, 3).double()
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        kept = [optimizer.state[p]["exp_avg"] * p for p in model.parameters()]
        return F.cross_entropy(out, y) + sum(v.sum() for v in kept)

    check(psg_fx.transform(model, loss, backend="eager"), model, loss)
    assert list(optimizer.state) == list(model.parameters())
    optimizer.state_dict()


def test_cached_parametrizations() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3).double())
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    with nn.utils.parametrize.cached():
        before = model(X)
        step(X, Y)
        assert torch.equal(model(X), before)
    check(step, model)


def test_a_loss_that_holds_the_model() -> None:
    model = nn.Linear(3, 3).double()

    class Decayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out, y) + self.model.weight.square().sum()

    loss = Decayed()
    check(psg_fx.transform(model, loss, backend="eager"), model, loss)


def test_checkpointed_step() -> None:
    """Hooks on tensors that autograd keeps are the caller's, and do not reach the capture."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    step = psg_fx.transform(model, backend="eager")
    x = X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(step, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    found = x.grad.clone()
    x.grad = None
    model(x).sum().backward()
    assert torch.allclose(found, x.grad)


@pytest.mark.parametrize("transformed", [torch.func.grad, lambda f: torch.func.vmap(f, randomness="same")])
def test_inside_a_transformation(transformed: Callable[[Any], Any]) -> None:
    model = nn.Linear(3, 3).double()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    check(step, model)
    with pytest.raises(psg_fx.NotYetSupported, match=r"input_0 is a tensor of torch\.func"):
        transformed(lambda x: step(x, Y).norms.sum())(X if transformed is torch.func.grad else X[None])
    check(step, model)
