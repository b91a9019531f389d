"""`vmap` with its results' dim elsewhere than in front: `vmap(f, out_dims=1)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import psg_fx
from psg_fx import Grads
from support import oracle
from support.programs import square


def critics(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda x, w: F.linear(x, w), (None, 0), out_dims=1)(x, m.stacked).mean(1)


def samples(m: Any, x: Tensor) -> Tensor:
    return vmap(m.layer, out_dims=1)(x).mT


def several(m: Any, x: Tensor) -> Tensor:
    first, (last, held) = vmap(
        lambda w: (F.linear(x, w), (F.linear(x, w).sin(), m.layer.bias)), out_dims=(-1, (1, None))
    )(m.stacked)
    return first.sum(-1) + last[:, 0] * held


def nested(m: Any, x: Tensor) -> Tensor:
    inner = vmap(lambda row, w: w @ row, (None, 0), out_dims=1)
    return vmap(inner, (0, None), out_dims=2)(x, m.stacked).permute(2, 1, 0).sum(1)


def derivative(m: Any, x: Tensor) -> Tensor:
    jacobian = vmap(torch.func.jacrev(lambda v: m.layer(v).tanh()), out_dims=1)(x)
    return jacobian.movedim(1, 0).sum(-1)


PROGRAMS: list[Callable[[Any, Tensor], Tensor]] = [critics, samples, several, nested, derivative]


class Model(nn.Module):
    def __init__(self, program: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.program, self.layer = program, nn.Linear(4, 3)
        self.stacked = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self, x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # export looks for what it may have been
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients(program: Any) -> None:
    torch.manual_seed(0)
    model = Model(program).double()
    step = psg_fx.transform(model, square, quantities=Grads(), backend="eager")
    for count in (3, 1):
        x = torch.randn(count, 4, dtype=torch.float64)
        found, grads = oracle.check_call(step, model, square, x)
        assert oracle.worst_error(found.grads, grads) < 1e-12
