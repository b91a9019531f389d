"""`step.captures`: how often a step was captured, for which batch sizes, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx


class Scaled(nn.Module):
    """Reads a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), 1.0

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        return self.layer(x).pow(power) * self.scale


def made(**options: Any) -> psg_fx.PerSampleModule:
    return psg_fx.transform(Scaled(), lambda out: out.sum(), backend="eager", **options)


def called(step: psg_fx.PerSampleModule, *shape: int) -> str:
    """Why the call was captured."""
    before = step.captures
    step(torch.randn(shape))
    new = [c for c in step.captures if c not in before]
    return new[0].why if new else ""


def test_one_serves_every_batch_size() -> None:
    step = made()
    assert step.captures == ()
    assert called(step, 3, 4) == "first call"
    assert called(step, 7, 4) == ""
    (capture,) = step.captures
    assert (capture.number, capture.batch_size, capture.why) == (1, None, "first call")
    assert list(capture.graphs) == list(step.graphs)
    assert capture.seconds == pytest.approx(sum(step.timings.values()))
    assert repr(capture) == "Captured(number=1, batch_size=None, most=None, why='first call')"
    assert capture.guard.stands(capture.guard.structure)


def test_the_reason_is_what_has_changed() -> None:
    step = made()
    called(step, 3, 4)
    step.model.scale = 2.0
    guard = step.captures[0].guard
    assert not guard.stands(guard.structure)
    assert not guard.still_means(guard.structure)
    assert called(step, 3, 4) == "changed: Scaled.scale"
    inputs = "changed: the shapes or types of the inputs, or a value among them that is no tensor"
    assert called(step, 3, 2, 4) == inputs
    step((torch.randn(3, 4), 2))
    assert step.captures[-1].why == inputs
    step.model.layer = nn.Linear(4, 3)
    assert called(step, 3, 4) == "changed: the modules, parameters or buffers"
    with torch.autocast("cpu", torch.bfloat16):
        assert called(step, 3, 4) == "changed: autocast, or torch's defaults for new tensors"
    assert called(step, 3, 4) == ""
    assert [c.number for c in step.captures] == [1, 2, 3, 4, 5, 6]


def test_parameters_that_are_asked() -> None:
    step = made()
    called(step, 3, 4)
    step.model.layer.bias.requires_grad_(False)
    assert "which parameters are asked" in called(step, 3, 4)


def test_each_batch_size_of_its_own() -> None:
    step = made(dynamic=False)
    assert called(step, 3, 4) == "first call"
    assert called(step, 5, 4) == "changed: the batch size"
    assert called(step, 3, 4) == ""
    assert [c.batch_size for c in step.captures] == [3, 5]


def test_what_is_forgotten_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psg_fx.program.captured.MOST", 2)
    step = made()
    for tokens in (1, 2, 3):
        called(step, 3, tokens, 4)
    assert [c.number for c in step.captures] == [2, 3]


def test_without_a_loss() -> None:
    step = psg_fx.transform(nn.Linear(4, 3), backend="eager")
    F.cross_entropy(step(torch.randn(2, 4)), torch.tensor([0, 1]), reduction="sum").backward()
    assert [c.why for c in step.captures] == ["first call"]
    assert {"forward", "backward"} <= step.captures[0].graphs.keys()
