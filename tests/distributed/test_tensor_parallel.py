"""Models sliced by `parallelize_module` give what one process gives with whole parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import psg_fx
from support.processes import Processes

pytestmark = pytest.mark.xdist_group("processes")


class Perceptron(nn.Module):
    """A norm and a head that are whole, and a layer cut by columns before one cut by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(self.up(self.norm(x)).tanh())).mean(1)


def perceptron() -> tuple[nn.Module, Any, Tensor, Tensor]:
    return Perceptron(), F.cross_entropy, torch.randn(5, 4, 6, dtype=torch.float64), torch.randint(3, (5,))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == expected.shape
    return float((whole - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def transformed(model: nn.Module, loss_fn: Any, quantities: Any) -> Any:
    return psg_fx.transform(model, loss_fn, quantities=quantities, backend="eager", progress=False)


def check(rank: int, world: int) -> None:
    model, loss_fn, x, y = perceptron()
    model.double()
    whole = copy.deepcopy(model)
    parallelize_module(model, init_device_mesh("cpu", (world,)), PLAN)
    q = [psg_fx.ClippedSum(max_norm=0.3)]
    step, one = transformed(model, loss_fn, q), transformed(whole, loss_fn, q)
    for _ in range(2):
        out, expected = step(x, y), one(x, y)
        torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=0)
        for name, v in expected.clipped_sum.items():
            assert far(out.clipped_sum[name], v) < 1e-10
    if rank == 0:
        print(step.print_graph())


def test_it(processes: Processes) -> None:
    processes.run(check, 2)
