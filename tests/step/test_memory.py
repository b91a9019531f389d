"""What a step keeps alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx


@pytest.mark.parametrize("with_loss", [True, False])
def test_no_batch_outlives_its_call(with_loss: bool) -> None:
    model, targets = nn.Linear(6, 3), torch.tensor([0, 1, 2, 1])
    step = psg_fx.transform(model, F.cross_entropy if with_loss else None, backend="eager")
    for _ in range(2):
        inputs = torch.randn(4, 6)
        alive = weakref.ref(inputs)
        out = step(inputs, targets) if with_loss else step(inputs).detach()
        del inputs, out
        gc.collect()
        assert alive() is None
