"""What is drawn beside a training leaves its generators as they were."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

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
