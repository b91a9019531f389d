"""What a step returns is its caller's to write into: no two answers share memory, as no two gradients of autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, Quantity, SecondMoment, WeightedSum


class Added(nn.Module):
    """Biases, and of the two layers that read the same also weights, that have equal gradients: one as a column."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.column = nn.Linear(4, 3), nn.Linear(4, 3), nn.Parameter(torch.zeros(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) + self.column[:, 0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x[None])[0][0]
        return found


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def places(tree: Any) -> list[tuple[int, int]]:
    return [(t.untyped_storage().data_ptr(), t.storage_offset()) for t in pytree.tree_leaves(tree)]


EVERY: list[Quantity] = [
    Grads(), MeanGrad(), ClippedSum(0.1), WeightedSum(), SecondMoment(), Gram(), Dots(), Projection(2),
    Norms(per="parameter"),
]  # fmt: skip


@pytest.mark.parametrize("kind", [Added, Recurrent])
def test_answers_lie_apart(kind: type[nn.Module]) -> None:
    model, (x, y) = made(kind), batch()
    step = psg_fx.transform(model, F.cross_entropy, quantities=EVERY, backend="eager")
    directions = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    found = places(vars(step(x, y, weights=torch.ones(5), directions=directions)))
    assert len(set(found)) == len(found)


@pytest.mark.inductor
@pytest.mark.parametrize(("backend", "reuse"), [("inductor", False), ("inductor", True), ("aot_eager", False)])
def test_compilers_leave_them_apart(backend: str, reuse: bool) -> None:
    """Three that are equal, of which one has another shape."""
    step = psg_fx.transform(
        made(Added), F.cross_entropy, quantities=[Grads(), MeanGrad()], backend=backend, reuse_outputs=reuse
    )
    for _ in range(2):
        found = places(vars(step(*batch())))
        assert len(set(found)) == len(found)


def test_gradients_without_a_loss() -> None:
    model, (x, y) = made(Added), batch()
    F.cross_entropy(psg_fx.transform(model, backend="eager")(x), y).backward()
    found = places([p.grad_sample for p in model.parameters()])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("kind", [Added, Recurrent])
def test_training_that_clips_in_place_is_ordinary_training(kind: type[nn.Module]) -> None:
    model, (x, y) = made(kind), batch()
    ordinary = copy.deepcopy(model)
    step = psg_fx.transform(model, F.cross_entropy, quantities=MeanGrad(), backend="eager")
    for _ in range(3):
        psg_fx.distributed.set_grad(model, step(x, y).mean_grad)
        ordinary.zero_grad()
        F.cross_entropy(ordinary(x), y).backward()
        for trained in (model, ordinary):
            nn.utils.clip_grad_norm_(trained.parameters(), 0.05)
            torch.optim.SGD(trained.parameters(), lr=1.0).step()
    for got, want in zip(model.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_sums_lie_as_their_parameters_do(backend: str) -> None:
    """A fused optimizer walks a parameter and its gradient by their memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 3)).to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(36, 3).t())
    x, y = torch.randn(4, 3, 5, 5), torch.randint(3, (4,))
    sums: list[Quantity] = [MeanGrad(), ClippedSum(0.1), WeightedSum(), SecondMoment()]
    out = psg_fx.transform(model, F.cross_entropy, quantities=sums, backend=backend)(x, y, weights=torch.ones(4))
    for name, parameter in model.named_parameters():
        for field in ("mean_grad", "clipped_sum", "weighted_sum", "second_moment"):
            assert vars(out)[field][name].stride() == parameter.stride()
