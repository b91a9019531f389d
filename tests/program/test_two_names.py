"""A module under two names: what is tried and compared leaves the user's own parameters where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads
from psg_fx.benchmarking.benchmark import benchmark
from support import oracle


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again, self.norm = self.first, nn.BatchNorm1d(4)
        self.norm_again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        """A squeeze that could take the samples is tried on a sample alone."""
        return self.norm_again(self.again(self.first(x).tanh()))[:, None].squeeze()


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(-1).mean()


def stepped(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """What the test does by itself."""


def validated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    assert psg_fx.transform(model, distance, quantities=Grads(), backend="eager").validate(x, y).ok


def benchmarked(model: nn.Module, x: Tensor, y: Tensor) -> None:
    benchmark(model, distance, x, y, quantities=Grads(), backend="eager", rounds=1, min_run_time=0.01)


@pytest.mark.parametrize("use", [stepped, validated, benchmarked])
def test_the_model_keeps_its_parameters(use: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
    torch.manual_seed(0)
    model = Named().double().eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: t.clone() for name, t in tensors.items()}
    x, y = torch.randn(2, 3, 4, dtype=torch.float64)
    use(model, x, y)
    step = psg_fx.transform(model, distance, quantities=Grads(), backend="eager")
    for _ in range(2):
        assert oracle.worst_error(step(x, y).grads, oracle.loop_grads(model, distance, x, y)[1]) < 1e-12
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(now) == list(tensors)
    assert all(now[name] is t and torch.equal(t, values[name]) for name, t in tensors.items())


class Counting(nn.Module):
    """Writes buffers at every call, as spectral norms and codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


def both(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.Tanh(), module)


class OneOfTwo(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.again = module, module

    def forward(self, x: Tensor) -> Tensor:
        return self.again(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("named", [both, OneOfTwo])
def test_buffers_of_a_module_with_two_names_are_written(named: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x, y = named(Counting()).double(), *torch.randn(2, 3, 4, dtype=torch.float64)
    other = named(Counting()).double()
    other.load_state_dict(model.state_dict())
    step = psg_fx.transform(model, distance, quantities=Grads(), backend="eager")
    for count in (3, 1):
        found, grads = oracle.check_call(step, model, distance, x[:count], y[:count])
        assert oracle.worst_error(found.grads, grads) < 1e-12
        other(x[:count])
        for own, want in zip(model.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(own, want)
