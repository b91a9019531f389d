"""What is drawn beside a training leaves its generators as they were."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.generators import generators_kept


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def test_generators_are_kept() -> None:
    seed()
    expected = drawn()
    seed()
    with generators_kept(torch.device("cpu")):
        assert drawn() == expected
    assert drawn() == expected


def test_a_measured_plan_draws_nothing_of_the_training() -> None:
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    step(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    seed()
    expected = drawn()
    seed()
    step.explain(measure=True)
    assert drawn() == expected


def _of_python(x: Tensor) -> Tensor:
    return x * random.random()


def _of_numpy(x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.randn_like(x)


@pytest.mark.parametrize("draw", [_of_python, _of_numpy, _seeded])
def test_a_call_that_is_refused_leaves_them(draw: Callable[[Tensor], Tensor]) -> None:
    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return draw(super().forward(x))

    step = psg_fx.transform(Drawing(4, 3), lambda out: out.square().sum(1), backend="eager")
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    with pytest.raises(psg_fx.PsgError):
        step(torch.ones(2, 4))
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
