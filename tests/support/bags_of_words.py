"""Bags of words of any length, and an embedding that reads them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import Rows
from support.rows_of_samples import Batch, Part

IDS = Rows.from_offsets("offsets")


class Bags(nn.Module):
    """Of a bag of words its class."""

    def __init__(self, weighted: bool = False, **given: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, **given), nn.Linear(4, 3)
        self.weighted = weighted

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(ids, offsets, weights if self.weighted else None)))


def losses(out: Tensor, y: Tensor) -> Tensor:
    """The loss of each bag."""
    return F.cross_entropy(out, y, reduction="none")


def bags(lengths: list[int], last: bool, seed: int = 0) -> Batch:
    """Bags of so many words.  last: whether the offsets say where the last one ends."""
    drawn = torch.Generator().manual_seed(seed)
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    ids = torch.randint(9, (int(starts[-1]),), generator=drawn)
    weights = torch.randn(len(ids), generator=drawn, dtype=torch.float64)
    y = torch.randint(3, (len(lengths),), generator=drawn)
    alone = []
    for s, n in enumerate(lengths):
        own = slice(int(starts[s]), int(starts[s]) + n)
        alone.append(Part((ids[own], torch.tensor([0, n] if last else [0]), weights[own]), (y[s : s + 1],)))
    offsets = starts if last else starts[:-1]
    return Batch(Part((ids, offsets, weights), (y,)), tuple(alone), ((IDS, None if last else 0, IDS), 0))
