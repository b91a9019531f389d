"""Samples in loaders, and outputs beside one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from support import oracle


def samples(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator, dtype=dtype), torch.randint(3, (count,), generator=generator)


def loader(count: int, size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(count)), size, **options)


def compare(got: Any, want: Any) -> None:
    assert set(vars(got)) == set(vars(want))
    for field, value in vars(want).items():
        found = getattr(got, field)
        pairs = [(found[n], value[n]) for n in value] if isinstance(value, dict) else [(found, value)]
        for a, b in pairs:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), field
            assert oracle.relative_error(a, b) < 1e-5, field


class Stream(IterableDataset[Any]):
    """Of a length that nobody knows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(self.count), strict=True)
