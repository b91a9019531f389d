"""Whole models in small sizes, against a float64 loop over single samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads, Norms, zoo
from support import oracle
from support.selection import one_in

SIZES: dict[str, dict[str, Any]] = {
    "simplecnn": {"batch": 3, "image": 8, "width": 3, "hidden": 7, "classes": 4},
    "resnet18gn": {"batch": 2, "width": 8, "groups": 4, "image": 32},
    "gpt": {"batch": 3, "layers": 2, "width": 8, "heads": 2, "tokens": 6, "vocabulary": 11},
    "gpt-tied": {"batch": 3, "layers": 1, "width": 8, "heads": 2, "tokens": 6, "vocabulary": 11, "tied": True},
    "vit": {"batch": 3, "layers": 2, "width": 12, "heads": 3, "image": 8, "patch": 4},
    "lstm": {"batch": 3, "tokens": 5, "vocabulary": 11, "width": 4, "hidden": 5, "layers": 2},
    "encoder": {"batch": 3, "tokens": 5, "width": 8, "heads": 2, "layers": 2, "hidden": 12},
    "encoder-time-major": {
        "batch": 3, "tokens": 5, "width": 8, "heads": 2, "layers": 2, "hidden": 12, "batch_first": False,
    },
}  # fmt: skip


class GRUClassifier(nn.Module):
    """A two-layer GRU in both directions over time-major features."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5, num_layers=2, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][-1])  # type: ignore[no-any-return]


def example(name: str) -> zoo.Example:
    if name == "gru":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, x = GRUClassifier(), torch.randn(4, 3, 4)
        return zoo.Example("gru", model, F.cross_entropy, x, torch.tensor([0, 2, 1]), (1, 0))
    known = ["encoder", "gpt"]
    return zoo.example(next((k for k in known if name.startswith(k)), name), **SIZES[name])


def cast(ex: zoo.Example, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    inputs = ex.inputs.to(dtype) if ex.inputs.is_floating_point() else ex.inputs
    return ex.model.to(dtype), inputs


LIGHT = ("simplecnn", "gpt-tied", "lstm")
"""A convolution, attention with tied weights, a loop over time: the others have these in them."""


@pytest.mark.parametrize("name", one_in(3, [*SIZES, "gru"], always=LIGHT))
def test_float64(name: str) -> None:
    """Norms and the clipped sum, which need not keep the gradients."""
    ex = example(name)
    model, inputs = cast(ex, torch.float64)
    _, grads = oracle.loop_grads(model, ex.loss_fn, inputs, ex.targets, batch_dim=ex.batch_dim)
    bound = oracle.norms(grads).median().item()
    asked = [Norms(), ClippedSum(bound)]
    step = psg_fx.transform(model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim, backend="eager")
    out = step(inputs, ex.targets)
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-10
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, bound)) < 1e-10
    assert set(vars(out)) == {"losses", "norms", "clipped_sum", "clip_factors"}


@pytest.mark.parametrize("name", one_in(9, [*SIZES, "gru"]))
def test_gradients_alone(name: str) -> None:
    ex = example(name)
    model, inputs = cast(ex, torch.float64)
    losses, grads = oracle.loop_grads(model, ex.loss_fn, inputs, ex.targets, batch_dim=ex.batch_dim)
    out = psg_fx.transform(model, ex.loss_fn, batch_dim=ex.batch_dim, backend="eager")(inputs, ex.targets)
    assert oracle.relative_error(out.losses, losses) < 1e-10
    assert oracle.worst_error(out.grads, grads) < 1e-10


@pytest.mark.parametrize("name", one_in(9, [*SIZES, "gru"]))
def test_float32(name: str) -> None:
    ex = example(name)
    model, inputs = cast(ex, torch.float32)
    _, grads = oracle.loop_grads(model, ex.loss_fn, inputs, ex.targets, batch_dim=ex.batch_dim)
    bound = oracle.norms(grads).median().item()
    asked = [Grads(), Norms(), ClippedSum(bound)]
    step = psg_fx.transform(model, ex.loss_fn, quantities=asked, batch_dim=ex.batch_dim, backend="eager")
    out = step(inputs, ex.targets)
    assert oracle.worst_error(out.grads, grads) < 2e-5
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < 2e-5
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, bound)) < 2e-5


def test_grads_are_the_default() -> None:
    ex = example("simplecnn")
    step = psg_fx.transform(ex.model, ex.loss_fn, backend="eager")
    assert step.quantities == (Grads(),)
