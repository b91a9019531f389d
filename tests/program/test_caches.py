"""Caches of the code hold nothing of a capture, and what is kept by the batch size is refused."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 3, generator=GENERATOR, dtype=torch.float64), torch.tensor([0, 2, 1, 1])


@functools.lru_cache
def cached(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.float64)


class WithCaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    @functools.cached_property
    def scale(self) -> Tensor:
        return torch.full((3,), 2.0, dtype=torch.float64)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def shift(self, size: int) -> Tensor:
        return torch.full((size,), 3.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * cached(3) * self.scale + self.shift(3)


def test_caches_hold_nothing_of_a_capture() -> None:
    model = WithCaches()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for _ in range(2):
        out = step(X, Y)
        assert type(cached(3)) is type(model.shift(3)) is type(model.scale) is Tensor
        losses, grads = oracle.loop_grads(model, F.cross_entropy, X, Y)
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12


class WithCacheBySize(nn.Module):
    """Keeps something for each batch size: by a function in a closure, or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 3).double(), {}

        @functools.lru_cache
        def share(size: int) -> Tensor:
            return torch.full((size, 1), 1.0 / size, dtype=torch.float64)

        self.share = self.by_hand if by_hand else share

    def by_hand(self, size: int) -> Tensor:
        if size not in self.kept:
            self.kept[size] = torch.tensor(1.0 / size, dtype=torch.float64)
        return self.kept[size]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.share(x.shape[0])


@pytest.mark.filterwarnings("ignore:.*batch size")
def test_a_cache_by_the_batch_size_holds_nothing_of_a_capture() -> None:
    model = WithCacheBySize(by_hand=False)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    ordinary = model(X[:1])
    for size in (2, 3, 2):
        out = step(X[:size], Y[:size])
        assert type(model.share(size)) is Tensor
        losses, grads = oracle.loop_grads(model, F.cross_entropy, X[:size], Y[:size])
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12
    assert torch.equal(model(X[:1]), ordinary)


def test_a_table_by_the_batch_size_is_refused() -> None:
    model = WithCacheBySize(by_hand=True)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (2, 3):
        with pytest.raises(psg_fx.NotYetSupported, match="the code keeps values by the batch size"):
            step(X[:size], Y[:size])
        assert not model.kept
