"""Buffers that a model decides by and writes: known until they are written themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_flags import X, Y
from torch import Tensor, nn

import psg_fx
from support import oracle


class Quantised(nn.Module):
    """Asks two buffers, writes, and asks again: a flag of one number, and a part of a large one."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4).double(), write
        self.register_buffer("ready", torch.tensor([True]))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("large", torch.zeros(10_000))
        self.register_buffer("part", self.large[:2])

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x) if self.ready else 2 * self.layer(x)
        h = h if self.part.sum() == 0 else 3 * h
        self.write(self)
        h = h + 1 if self.ready else h
        return h if self.part.sum() == 0 else 5 * h


WRITES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "another": (lambda m: m.mean.add_(1), True),
    "the data of another": (lambda m: m.mean.data.lerp_(torch.ones(4, dtype=torch.float64), 0.1), True),
    "the flag": (lambda m: m.ready.fill_(False), False),
    "its data": (lambda m: m.ready.data.fill_(False), False),
    "a view of it": (lambda m: m.ready.view(1)[:1].logical_not_(), False),
    "what the part is of": (lambda m: m.large.add_(1), False),
    "what the part is of, by data": (lambda m: m.large.data[1:].add_(1), False),
    "the part": (lambda m: m.part.detach().add_(1), False),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_not_known_and_the_rest_is(name: str) -> None:
    """Two layers in a row, as of a residual quantiser that keeps running means."""
    write, known = WRITES[name]
    model = nn.Sequential(Quantised(write), Quantised(write))
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    if not known:
        with pytest.raises(psg_fx.CaptureFailed, match="branches on values of a tensor"):
            step(X, Y)
        return
    for _ in range(2):
        want = oracle.loop_grads(copy.deepcopy(model), F.cross_entropy, X, Y)[1]
        assert oracle.worst_error(step(X, Y).grads, want) < 1e-12
    assert len(step.captures) == 1
