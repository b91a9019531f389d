"""Small models for tests that are not about the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx


def mlp() -> nn.Module:
    """Two linear layers, 4 -> 5 -> 3."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def same_mlp() -> nn.Module:
    """`mlp()` in float64, with the same weights every time."""
    torch.manual_seed(0)
    return mlp().double()


def step(model: nn.Module | None = None, loss: Any = F.cross_entropy, **options: Any) -> Any:
    """A step of the model, `mlp()` by default."""
    return psg_fx.transform(mlp() if model is None else model, loss, **{"backend": "eager"} | options)


class WithLayer(nn.Module):
    """Base of models with one linear layer, 4 -> 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)


class OwnLoss(WithLayer):
    """A model that computes its loss itself."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.layer(x)
        return {"logits": out} if labels is None else {"loss": F.cross_entropy(out, labels), "logits": out}


class Several(WithLayer):
    """A model whose one argument is a list."""

    def forward(self, xs: list[Tensor]) -> Tensor:
        return self.layer(xs[0] + xs[1])
