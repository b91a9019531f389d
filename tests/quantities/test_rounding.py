"""A clipped sum holds its bound where the gradients of positions cancel and their norm is lost in rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import zoo
from support import oracle
from support.selection import one_in

T = 64
aten = torch.ops.aten
ALTERNATING = (torch.arange(T) % 2 * 2 - 1).float()


class Twice(nn.Module):
    """One weight, used twice: its gradient has cross terms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x.flip(1))


def rows(*shape: int) -> Tensor:
    """Rows that are nearly the same at all positions."""
    return torch.randn(4, 1, *shape).expand(4, T, *shape) * 100 + torch.randn(4, T, *shape) * 1e-2


def planes(channels: int) -> Tensor:
    return rows(channels).movedim(1, -1).reshape(4, channels, 8, 8).contiguous()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "linear": (
        lambda: nn.Linear(512, 512, bias=False),
        lambda: (rows(512), torch.randn(4, 1, 512) * ALTERNATING[:, None] * 100),
    ),
    "embedding": (
        lambda: nn.Embedding(50_000, 64),
        lambda: (torch.randint(50_000, (4, 1)).expand(4, T).contiguous(), torch.randn(4, 1, 64) * ALTERNATING[:, None]),
    ),
    "pointwise convolution": (
        lambda: nn.Conv2d(256, 256, 1, bias=False),
        lambda: (planes(256), torch.randn(4, 256, 1, 1) * ALTERNATING.reshape(8, 8) * 100),
    ),
    "twice": (Twice, lambda: (rows(128), torch.randn(4, 1, 128) * ALTERNATING[:, None] * 100)),
}


def weighed(y: Tensor, cotangent: Tensor) -> Tensor:
    """A loss whose gradient is the target."""
    return (y * cotangent).flatten(1).sum(1)


def norms(model: nn.Module, x: Tensor, cotangent: Tensor) -> Tensor:
    """2-norms of the gradients in float64, one sample at a time."""
    inputs = x.double() if x.is_floating_point() else x
    _, grads = oracle.loop_grads(model, weighed, inputs, cotangent.double())
    return oracle.norms(grads)


def cancelling(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    make, data = MODELS[name]
    return (make(), *data())


def step_of(model: nn.Module, **options: str) -> psg_fx.PerSampleModule:
    asked = psg_fx.ClippedSum(max_norm=1e-3, **options)
    return psg_fx.transform(model, weighed, quantities=asked, backend="eager", progress=False)


OPTIONS: tuple[dict[str, str], ...] = ({}, {"per": "parameter"}, {"style": "automatic"})


@pytest.mark.parametrize(("name", "options"), one_in(2, itertools.product(MODELS, OPTIONS)))
def test_the_bound_holds_where_positions_cancel(name: str, options: dict[str, str]) -> None:
    model, x, cotangent = cancelling(name)
    found = step_of(model, **options)(x, cotangent).clip_factors
    (factors,) = found.values() if isinstance(found, dict) else [found]
    assert (factors.double() * norms(model, x, cotangent)).max() <= 1e-3 * math.sqrt(2)


def test_without_a_floor_it_would_not() -> None:
    """The norms alone are lost: taken as they are found, a sample would have more than a thousand times its bound."""
    model, x, cotangent = cancelling("linear")
    lost = step_of(model)(x, cotangent).norms.double()
    unbounded = torch.where(lost > 1e-3, 1e-3 / lost, 1.0)
    assert (unbounded * norms(model, x, cotangent)).max() > 1


def test_a_plan_without_gram_matrices_has_no_floor() -> None:
    step = step_of(nn.Linear(4, 3))
    step(torch.randn(5, 4), torch.randn(5, 3))
    choices = step.graphs["lowered"].graph.find_nodes(op="call_function", target=aten.where.self)
    assert len(choices) == 3  # the clip factors, 0 for a norm that is not finite, and NaN for a bound below zero


def test_ordinary_samples_are_clipped_to_their_norm() -> None:
    torch.manual_seed(0)
    ex = zoo.example("gpt", 4)
    asked = psg_fx.ClippedSum(max_norm=1e-3)
    found = psg_fx.transform(ex.model, ex.loss_fn, quantities=asked, backend="eager", progress=False)(
        ex.inputs, ex.targets
    )
    assert torch.equal(found.clip_factors, 1e-3 / found.norms)
