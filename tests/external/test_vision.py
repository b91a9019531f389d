"""Image classifiers of torchvision and timm are exact against the loop, or refused for the reason that holds.

`make test-all` runs the whole list; what is left out otherwise has a near relative in it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import psg_fx
from external import vision_zoo as zoo
from external.program import Program, check, check_learns, drop_in, with_loss
from support.selection import selected

CHOSEN = {"tv/resnet-train", "timm/condconv"}


@pytest.mark.slow
@pytest.mark.parametrize("program", selected(zoo.programs(), CHOSEN))
def test_exact_or_refused(program: Program) -> None:
    check(program, drop_in if program.name.endswith("-outside") else with_loss)


@pytest.mark.parametrize("program", selected(zoo.programs(), CHOSEN))
def test_every_model_learns(program: Program) -> None:
    check_learns(program)


def test_batch_norm_of_one_sample() -> None:
    """A step on one sample agrees with its row, also where the gradient that comes back is transposed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(2)).double().eval()
        x, weights = torch.randn(3, 3, 4, 4, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    step = psg_fx.transform(model, lambda out: (out.transpose(1, 2).sin() * weights).sum(), backend="eager")
    rows, one = step(x).grads, step(x[:1]).grads
    for name, row in rows.items():
        torch.testing.assert_close(one[name], row[:1])
