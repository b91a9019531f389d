"""Batches without samples, in the form of those that a loader collates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")

SAMPLES: Any = [(torch.randn(6), k % 5) for k in range(10)]
SHARED = torch.rand(6)


class Scaled(nn.Module):
    """A layer behind a factor that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x * scale)


class Turned(nn.Linear):
    """Takes samples in the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.T)


def with_scale(samples: Any) -> Any:
    x, y = default_collate(samples)
    return (x, SHARED), y


def turned(samples: Any) -> Any:
    x, y = default_collate(samples)
    return x.T.contiguous(), y


def private(model: nn.Module, collate: Any, batch_dim: Any = 0, samples: Any = SAMPLES, **options: Any) -> Any:
    from psg_fx.integrations.opacus import PrivateTraining

    loader: Any = DataLoader(samples, 1, collate_fn=collate, generator=torch.Generator().manual_seed(3))
    return PrivateTraining(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), options.pop("loader", loader),
        noise_multiplier=1.0, max_grad_norm=1.0, backend="eager", batch_dim=batch_dim, **options,
    )  # fmt: skip


@pytest.mark.parametrize("part", [None, 1])
def test_what_all_samples_share_stays(part: int | None) -> None:
    train = private(Scaled(), with_scale, ((0, None), 0), part=part)
    sizes = [len(train.step((x, scale), y).losses) for _ in range(2) for (x, scale), y in train.loader]
    assert 0 in sizes
    assert max(sizes) > 1


def test_samples_may_lie_in_another_dim() -> None:
    train = private(Turned(6, 5), turned, (1, 0))
    x, y = train.loader.collate_fn([])
    assert (list(x.shape), list(y.shape)) == ([6, 0], [0])
    out = train.step(x, y)
    assert not any(value.any() for value in out.clipped_sum.values())
    assert {len(train.step(x, y).losses) for x, y in train.loader} >= {0, 1}


def test_nothing_of_an_empty_batch_tells_of_a_sample() -> None:
    train = private(Scaled(), lambda rows: {"x": default_collate(rows)[0], "first": rows[0][0], "kind": "row"})
    empty = train.loader.collate_fn([])
    assert (list(empty["x"].shape), empty["kind"]) == ([0, 6], "row")
    assert not empty["first"].any()
    empty["first"].fill_(1)
    assert not train.loader.collate_fn([])["first"].any()


def test_where_sizes_do_not_show_the_samples_opacus_makes_the_batch() -> None:
    """A batch that is padded to one size holds samples, and is not what an empty one should be."""
    from psg_fx.integrations.empty_batches import show_empty

    def padded(rows: Any) -> Any:
        return torch.cat([default_collate(rows)[0], torch.zeros(20 - len(rows), 6)])

    loader: Any = opacus.data_loader.DPDataLoader.from_data_loader(DataLoader(SAMPLES, 1, collate_fn=padded))
    assert not show_empty(loader)
    assert list(loader.collate_fn([]).shape) == [0, 6]


def test_functions_that_change_samples_and_loaders_that_are_given_twice() -> None:
    rows: Any = [{"x": torch.randn(6), "y": torch.tensor(k % 5)} for k in range(10)]

    def collate(samples: Any) -> Any:
        labels = torch.stack([sample.pop("y") for sample in samples])
        return torch.stack([sample["x"] for sample in samples]), labels

    from psg_fx.integrations.empty_batches import Collate

    train = private(nn.Linear(6, 5), collate, samples=rows)
    assert isinstance(train.loader.collate_fn, Collate)
    again = private(nn.Linear(6, 5), None, loader=train.loader)
    assert again.loader.collate_fn is train.loader.collate_fn
    assert not isinstance(again.loader.collate_fn.of_samples, Collate)
