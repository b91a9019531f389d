"""An image that all samples share, looked up at the points of all samples in one grid: planes of radiance fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, Norms
from support import oracle
from support.programs import square


class Field(nn.Module):
    """Features of points `[B, n, 3]`, by a way to look them up."""

    def __init__(self, look_up: Any) -> None:
        super().__init__()
        self.look_up, self.head = look_up, nn.Linear(4, 2)
        self.plane = nn.Parameter(torch.randn(1, 4, 5, 6))
        self.planes = nn.Parameter(torch.randn(3, 4, 5, 5))
        self.volume = nn.Parameter(torch.randn(1, 4, 3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        found = self.look_up(self, torch.tanh(x))
        return self.head(found).reshape(x.shape[0], -1)  # type: ignore[no-any-return]


def of_one_plane(model: Any, x: Tensor) -> Tensor:
    grid = x[..., :2].reshape(1, -1, 1, 2)
    return F.grid_sample(model.plane, grid, align_corners=True).view(4, -1).T


def along_the_other_dim(model: Any, x: Tensor) -> Tensor:
    grid = x[..., :2].reshape(1, 1, -1, 2)
    return F.grid_sample(model.plane, grid, mode="bicubic", align_corners=False)[0, :, 0].T


def of_three_planes(model: Any, x: Tensor) -> Tensor:
    points = x.reshape(-1, 3)
    grid = torch.stack([points[:, [0, 1]], points[:, [1, 2]], points[:, [0, 2]]])[:, :, None]
    return F.grid_sample(model.planes, grid, padding_mode="border", align_corners=True).sum(0)[..., 0].T


def of_a_volume(model: Any, x: Tensor) -> Tensor:
    grid = x.reshape(1, x.shape[0], x.shape[1], 1, 3)
    return F.grid_sample(model.volume, grid, align_corners=True)[0, ..., 0].movedim(0, -1)


def of_points_that_are_samples(model: Any, x: Tensor) -> Tensor:
    return F.grid_sample(model.plane, x[:, :1, :2][None], align_corners=True)[0].movedim(0, -1)


def of_points_side_by_side(model: Any, x: Tensor) -> Tensor:
    grid = x[..., :2].transpose(0, 1).reshape(1, -1, 1, 2)
    return F.grid_sample(model.plane, grid, align_corners=True).view(4, 2, x.shape[0]).permute(2, 1, 0)


def one_by_another(model: Any, x: Tensor) -> Tensor:
    grid = x[..., :2].reshape(1, -1, 1, 2)
    moved = F.grid_sample(model.planes[:1, :2], grid, align_corners=True)
    return F.grid_sample(model.plane, torch.tanh(moved).movedim(1, -1), align_corners=True)[0, ..., 0].T


LOOKUPS = [
    of_one_plane,
    along_the_other_dim,
    of_three_planes,
    of_a_volume,
    of_points_that_are_samples,
    of_points_side_by_side,
    one_by_another,
]


@pytest.mark.parametrize("look_up", LOOKUPS, ids=lambda f: f.__name__)
def test_gradients(look_up: Any) -> None:
    torch.manual_seed(0)
    model = Field(look_up).double()
    step = psg_fx.transform(model, square, quantities=[Grads(), Norms()], backend="eager")
    for count in (3, 1, 4):
        x = torch.randn(count, 2, 3, dtype=torch.float64)
        found, grads = oracle.check_call(step, model, square, x)
        torch.testing.assert_close(found.norms, oracle.norms(grads))
    assert len(step.captures) == 1
