"""Runs over a data set into a store, whole and interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psg_fx
from psg_fx import ClippedSum, Grads, MeanGrad, Projection, SecondMoment
from support.batches import samples
from support.small import same_mlp, step

QUANTITIES = [Projection(rank=2), Grads(), ClippedSum(0.3), MeanGrad(), SecondMoment(centered=True)]


def own_step(quantities: Any = QUANTITIES, model: nn.Module | None = None, loss: Any = F.cross_entropy) -> Any:
    return step(same_mlp().float() if model is None else model, loss, quantities=quantities)


class Stops(Exception):
    """What interrupts a run."""


class Broken(DataLoader[Any]):
    """A loader that stops after some batches."""

    after = 2

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number, batch in enumerate(super().__iter__()):
            if number == self.after:
                raise Stops
            yield batch


def interrupted(folder: Path, own: Any, count: int = 11, size: int = 3, **options: Any) -> None:
    with pytest.raises(Stops):
        psg_fx.over(Broken(TensorDataset(*samples(count)), size), own, store=folder, progress=False, **options)
