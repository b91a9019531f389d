"""The kernels of recurrent cells on a CUDA device: alone, and in steps that are told to have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads
from psg_fx.ops.recurrent.cells import DTYPES, IN_CELLS
from support import oracle
from support.device import CUDA

pytestmark = [*CUDA, pytest.mark.usefixtures("fresh_compiler", "full_precision")]

SIZES = [(3, 5, 7), (1, 1, 1), (4, 70, 130)]
"""Steps, samples and units."""


def arguments(name: str, sizes: tuple[int, int, int]) -> list[Any]:
    torch.manual_seed(0)
    (t, b, h), gates = sizes, 3 if name.startswith("gru") else 4
    x, state, cell = torch.randn(t, b, gates * h), torch.randn(b, h), torch.randn(b, h)
    w, bias = torch.randn(gates * h, h) / h**0.5, torch.randn(gates * h)
    return {
        "lstm": [x, state, cell, w, bias, None],
        "gru": [x, state, w, bias],
        "gru_backward": [torch.randn(t, b, h), torch.randn(t, b, h), x.sigmoid(), torch.randn(t, b, h), state, w],
        "lstm_backward": [torch.randn(t, b, h), cell, x.sigmoid(), state, torch.randn(t, b, h), torch.rand(t, b, h), w,
                          None],
    }[name]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["lstm", "gru", "lstm_backward", "gru_backward"])
def test_alone(name: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against the loop of torch's calls in float64, on what the dtype holds of the arguments."""
    op = getattr(torch.ops.psg_fx, name).default
    given = [value.to(dtype) if isinstance(value, Tensor) else value for value in arguments(name, sizes)]
    exact = op(*(value.double() if isinstance(value, Tensor) else value for value in given))
    found = IN_CELLS[op](*(value.cuda() if isinstance(value, Tensor) else value for value in given))
    for got, want in zip(found, exact, strict=True):
        assert got.dtype is dtype
        assert oracle.relative_error(got.cpu(), want) < 64 * torch.finfo(dtype).eps


class Model(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.out = kind(20, 24, num_layers=2, batch_first=True), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layer(x)[0][:, -1])
        return found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_in_a_step(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, x, y = Model(kind), torch.randn(6, 9, 20), torch.randint(5, (6,))
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    model.cuda()
    options = {"psg_fx.fused_kernels": True}
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), ClippedSum(0.1)], options=options)
    out = step(x.cuda(), y.cuda())
    assert oracle.worst_error({name: g.cpu() for name, g in out.grads.items()}, grads) < 2e-5
    sums = {name: g.cpu() for name, g in out.clipped_sum.items()}
    assert oracle.worst_error(sums, oracle.clipped_sum(grads, 0.1)) < 2e-5
