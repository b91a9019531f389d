"""What the code rounds and then computes with stays rounded where it is compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.graph import facts
from psg_fx.torch_private.inductor import keeps_roundings

HALF = torch.bfloat16
X, Y = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.rand(3)


class Changed(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change = nn.Linear(8, 8), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer(x))


def loss(o: Tensor, y: Tensor) -> Tensor:
    return (o * torch.arange(8.0).cos()).square().sum() * y.sum()


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "what is left over": lambda h: h + 300 * (h - h.to(HALF).float()).detach(),
    "straight through": lambda h: 100 * (h + (h.to(HALF).float() - h).detach() - h.detach()) + h,
    "promoted": lambda h: h + 100 * (h.to(HALF) - h).detach(),
    "a view of it": lambda h: h + 300 * (h - h.half().view(-1, 4, 2).flatten(1).float()).detach(),
    "below all that it has": lambda h: (h * 1e-9).half().float().detach() * 1e9 + h,
}


@pytest.mark.inductor
@pytest.mark.skipif(not keeps_roundings(), reason="refused")
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("again", [False, True])
def test_as_the_code_rounds(name: str, again: bool) -> None:
    """Again: passes after capture are read from where the first step left them."""
    model = Changed(ROUNDED[name])
    step = psg_fx.transform(model, loss, options={"psg_fx.compare_first": False})
    out = step(X, Y)
    for i in range(3):
        alone = loss(model(X[i : i + 1]), Y[i : i + 1])
        (grad,) = torch.autograd.grad(alone, [model.layer.weight])
        torch.testing.assert_close(out.losses[i], alone, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(out.grads["layer.weight"][i], grad, rtol=1e-2, atol=1e-2 * grad.abs().max().item())


@pytest.mark.inductor
def test_where_inductor_drops_roundings_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psg_fx.passes.compile.compile.keeps_roundings", lambda: False)
    with pytest.raises(psg_fx.NotYetSupported, match=r"rounds a value to fewer bits(?s:.*)backend=.eager"):
        psg_fx.transform(Changed(ROUNDED["promoted"]), loss)(X, Y)


@pytest.mark.inductor
@pytest.mark.skipif(not keeps_roundings(), reason="refused")
def test_without_a_loss() -> None:
    model = Changed(ROUNDED["what is left over"])
    step = psg_fx.transform(model)
    torch.testing.assert_close(step(X), model(X), rtol=1e-3, atol=1e-4)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer in half precision": lambda h: torch.tanh(h.to(HALF)).float(),
    "wider and back": lambda h: h.double().float(),
    "whole numbers": lambda h: h + h.long().float(),
}


@pytest.mark.parametrize("name", [*ROUNDED, *KEPT])
def test_which_are_told(name: str) -> None:
    step = psg_fx.transform(Changed((ROUNDED | KEPT)[name]), loss, backend="eager")
    step(X, Y)
    assert facts.graph_facts(step.graphs["captured"]).rounds is (name in ROUNDED)
