"""A model that reads numbers around it, and whether a step sees that one of them has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 3, dtype=torch.float64, generator=GENERATOR), torch.tensor([0, 2, 1, 1])


@dataclass
class Config:
    k: float = 1.0
    more: dict[str, Any] = field(default_factory=lambda: {"a": {"b": {"c": {"d": 1.0}}}})
    many: list[float] = field(default_factory=lambda: [1.0] * 200)


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Scaled(nn.Module):
    """A linear layer times `factor(self)`."""

    gain = 1.0

    def __init__(self, factor: Callable[[Any], Any] = lambda self: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(3, 3).double(), factor
        self.config, self.table, self.items = Config(), {"a": [1.0]}, [1.0, 2.0]
        self.array, self.slotted = np.ones(3), Slotted()
        self.plain = torch.ones(3, dtype=torch.float64)
        self.names = "gain"

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.layer(x))

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.factor(self)

    @property
    def doubled(self) -> float:
        return 2 * self.config.k

    def doubled_scaled(self, h: Tensor) -> Tensor:
        return 2 * h


Row = tuple[Callable[[], tuple[nn.Module, Any]], Callable[[nn.Module, Any], object]]


def scaled(factor: Callable[[Any], Any]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (Scaled(factor), F.cross_entropy)


def seen(row: Row) -> None:
    """What is changed counts at the next call, and the call after it captures nothing."""
    build, change = row
    model, loss = build()
    step = psg_fx.transform(model, loss, backend="eager")
    step(X, Y)
    before, _ = oracle.loop_grads(model, loss, X, Y)
    change(model, loss)
    losses, grads = oracle.loop_grads(model, loss, X, Y)
    assert not torch.allclose(before, losses), "the row changes nothing"
    out = step(X, Y)
    assert oracle.relative_error(out.losses, losses) < 1e-12
    assert oracle.worst_error(out.grads, grads) < 1e-12
    captured = len(step.captures)
    step(X, Y)
    assert len(step.captures) == captured
