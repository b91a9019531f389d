"""One row of what all samples hold alike: anybody's, where it has no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, SamplesMixed
from support import oracle
from support.programs import square

Row = Callable[[Any, Tensor], Tensor]


class Placed(nn.Module):
    """Adds `[4, 2]` of places to samples `[B, 8]`."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row, self.linear = row, nn.Linear(8, 3)
        self.register_buffer("places", torch.randn(4, 2))
        self.learned = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.sin() + self.row(self, x).reshape(-1))  # type: ignore[no-any-return]


ALIKE: dict[str, Row] = {
    "the first": lambda m, x: m.places[None].expand(x.shape[0], 4, 2)[0, :, :],
    "the last": lambda m, x: m.places.expand(x.shape[0], 4, 2)[-1],
    "a slice": lambda m, x: m.places.expand(x.shape[0], 4, 2)[:1],
    "repeated": lambda m, x: m.places.repeat(x.shape[0], 1, 1)[0],
    "reshaped": lambda m, x: m.places.expand(x.shape[0], 4, 2).reshape(x.shape[0], -1)[0],
    "computed": lambda m, x: (m.places.expand(x.shape[0], 4, 2) * 3).sin()[0],
    "of numbers": lambda m, x: torch.linspace(0, 1, 8, dtype=x.dtype).expand(x.shape[0], 8)[0],
    "zeros": lambda m, x: torch.zeros_like(x)[0],
    "detached": lambda m, x: m.learned.detach().expand(x.shape[0], 4, 2)[0],
}
UNLIKE: dict[str, Row] = {
    "learned": lambda m, x: m.learned.expand(x.shape[0], 4, 2)[0],
    "with what is learned": lambda m, x: (m.places * m.learned).expand(x.shape[0], 4, 2)[0],
    "of the samples": lambda m, x: x[0],
    "of the samples, detached": lambda m, x: (x * 0 + 1).detach()[0],
    "with the samples": lambda m, x: (m.places.expand(x.shape[0], 4, 2) + x.view(-1, 4, 2))[0],
}


@pytest.mark.parametrize("name", ALIKE)
def test_answered(name: str) -> None:
    model = Placed(ALIKE[name]).double()
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    for size in (3, 1, 5):
        oracle.check_call(step, model, square, torch.randn(size, 8, dtype=torch.float64))
    assert len(step.captures) == 1


@pytest.mark.parametrize("name", UNLIKE)
def test_refused(name: str) -> None:
    step = psg_fx.transform(Placed(UNLIKE[name]).double(), square, quantities=Grads(), backend="eager")
    with pytest.raises(SamplesMixed, match="so one sample's value is used for all"):
        step(torch.randn(3, 8, dtype=torch.float64))
