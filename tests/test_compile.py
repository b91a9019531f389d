"""The compiled backend gives what the eager one gives; a few models, since each takes seconds to compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oracle
import psg_fx
from psg_fx import ClippedSum, Grads, Norms, zoo

pytestmark = pytest.mark.inductor

SIZES: dict[str, dict[str, Any]] = {
    "simplecnn": {"batch": 4, "image": 10, "width": 4, "hidden": 8, "classes": 5},
    "gpt": {"batch": 3, "layers": 1, "width": 8, "heads": 2, "tokens": 6, "vocabulary": 11, "tied": True},
    "lstm": {"batch": 3, "tokens": 3, "vocabulary": 11, "width": 4, "hidden": 4, "layers": 1},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def outputs(ex: zoo.Example, backend: str, quantities: list[Any], count: int) -> Any:
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=quantities, batch_dim=ex.batch_dim, backend=backend)
    return step, step(ex.inputs[:count], ex.targets[:count])


def compare(got: Any, want: Any) -> None:
    assert set(vars(got)) == set(vars(want))
    for field, value in vars(want).items():
        if isinstance(value, dict):
            assert oracle.worst_error(getattr(got, field), value) < 1e-5, field
        else:
            assert oracle.relative_error(getattr(got, field), value) < 1e-5, field


@pytest.mark.parametrize("name", SIZES)
def test_inductor_equals_eager(name: str) -> None:
    ex = zoo.example(name, **SIZES[name])
    asked = [Norms(), ClippedSum(0.1)]
    _, want = outputs(ex, "eager", asked, len(ex.inputs))
    _, got = outputs(ex, "inductor", asked, len(ex.inputs))
    compare(got, want)


def test_two_batch_sizes_of_one_capture() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    asked = [Grads(), ClippedSum(0.5)]
    steps = {
        backend: psg_fx.transform(model, lambda out: out.square().sum(), quantities=asked, backend=backend)
        for backend in ("inductor", "eager")
    }
    for size in (4, 7, 4, 1):
        x = torch.randn(size, 4)
        compare(steps["inductor"](x), steps["eager"](x))
    assert len(steps["inductor"]._steps) == 1
