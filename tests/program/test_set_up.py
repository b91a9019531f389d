"""What code sets up in its first forward pass: hooks that are there afterwards, once, whoever ran it first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported
from support import oracle
from support.programs import square


class Recording(nn.Module):
    """Adds what hooks on its layers have recorded, which it registers as soon as they are needed."""

    def __init__(self, once: bool = True, **options: Any) -> None:
        super().__init__()
        self.layers, self.once, self.options = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), once, options
        self.recorded: list[Tensor] = []

    def record(self, *given: Any) -> None:
        self.recorded.append(given[-1])

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "is_set_up", False):
            for layer in self.layers:
                layer.register_forward_hook(self.record, **self.options)
            self.is_set_up = self.once
        for layer in self.layers:
            x = layer(x).tanh()
        x = x + torch.stack(self.recorded).sum(0)
        self.recorded.clear()
        return x


def hooks(model: Recording) -> list[int]:
    return [len(layer._forward_hooks) for layer in model.layers]


@pytest.mark.parametrize("options", [{}, {"with_kwargs": True}], ids=["hooks", "with kwargs"])
def test_hooks_are_there_once(options: dict[str, Any]) -> None:
    model, x = Recording(**options).double(), torch.randn(4, 3, dtype=torch.float64)
    step = psg_fx.transform(model, square, quantities=psg_fx.Grads(), backend="eager")
    out = step(x)
    assert hooks(model) == [1, 1]
    assert model.is_set_up
    assert model.recorded == []
    losses, grads = oracle.loop_grads(model, square, x, None)
    torch.testing.assert_close(out.losses, losses)
    assert oracle.worst_error(out.grads, grads) < 1e-12
    step(x)
    step(x[:3])
    assert hooks(model) == [1, 1]
    assert len(step.captures) == 1


def test_hooks_of_every_call_are_refused_and_taken_off() -> None:
    model = Recording(once=False)
    step = psg_fx.transform(model, square, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(NotYetSupported) as error:
        step(torch.randn(4, 3))
    lines = str(error.value).splitlines()
    assert lines[0] == "the code changes the hooks of Linear"
    assert lines[1].endswith("layer.register_forward_hook(self.record, **self.options)")
    assert hooks(model) == [0, 0]
    assert not hasattr(model, "is_set_up")


def test_a_step_that_is_refused_leaves_what_a_forward_leaves() -> None:
    model = Recording()
    step = psg_fx.transform(model, lambda out: (out - out.mean(0)).square().sum(), quantities=psg_fx.Norms())
    with pytest.raises(psg_fx.SamplesMixed):
        step(torch.randn(4, 3))
    assert hooks(model) == [1, 1]
    assert model.is_set_up
    assert model(torch.randn(2, 3)).shape == (2, 3)


class Setting(nn.Module):
    """`prepare(model)` in the first forward pass."""

    def __init__(self, prepare: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.prepare, self.ready, self.factor = nn.Linear(3, 3), prepare, False, 1
        self.held: Any = SimpleNamespace(factor=1)
        self.old = self.layer.register_forward_hook(lambda m, args, out: out + 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.prepare(self)
            self.ready = True
        return self.layer(x) * self.factor * self.held.factor


def tripled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


def prepended(model: Any) -> None:
    model.layer.register_forward_hook(tripled, prepend=True)


def with_a_number(model: Any) -> None:
    model.layer.register_forward_hook(tripled)
    model.factor = 5


def with_an_object(model: Any) -> None:
    model.layer.register_forward_hook(tripled)
    model.held = SimpleNamespace(factor=7)


def in_its_place(model: Any) -> None:
    model.old.remove()
    model.old = model.layer.register_forward_hook(tripled)


@pytest.mark.parametrize("prepare", [prepended, with_a_number, with_an_object, in_its_place])
def test_all_is_as_a_forward_leaves_it(prepare: Callable[[Any], None]) -> None:
    model, x = Setting(prepare).double(), torch.randn(4, 3, dtype=torch.float64)
    other = Setting(prepare).double()
    other.load_state_dict(model.state_dict())
    losses, grads = oracle.loop_grads(other, square, x, None)
    out = psg_fx.transform(model, square, quantities=psg_fx.Grads(), backend="eager")(x)
    torch.testing.assert_close(out.losses, losses)
    assert oracle.worst_error(out.grads, grads) < 1e-12
    torch.testing.assert_close(model(x), other(x))
    assert model.ready
    model.old.remove()
    other.old.remove()
    torch.testing.assert_close(model(x), other(x))


class First(Setting):
    """Its first forward pass is another one."""

    def __init__(self, factor: Callable[[bool], Any]) -> None:
        super().__init__(with_an_object)
        self.first = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(self.ready) * x)


@pytest.mark.parametrize(
    "factor", [lambda ready: 2 - ready, lambda ready: torch.tensor([2.0 - ready, 1.0, 1.0])], ids=["number", "tensor"]
)
def test_a_first_forward_of_its_own_is_refused(factor: Callable[[bool], Any]) -> None:
    model = First(factor)
    step = psg_fx.transform(model, square, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"first forward pass computes something else(.|\n)*call the model once"):
        step(torch.randn(4, 3))
    assert len(model.layer._forward_hooks) == 1
    assert not model.ready
    model(torch.randn(4, 3))
    step(torch.randn(4, 3))
