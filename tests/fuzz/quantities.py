"""Which quantities a program is asked for, alone and together."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum

SETS: dict[str, Callable[[float], list[Any]]] = {
    "all": lambda c: [
        Grads(), Norms(per="parameter"), ClippedSum(c), WeightedSum(), MeanGrad(), Dots(), Gram(), SecondMoment(),
        Projection(rank=2),
    ],
    "grads": lambda c: [Grads()],
    "norms": lambda c: [Norms()],
    "own norms": lambda c: [Norms(per="parameter", squared=True), MeanGrad()],
    "clipped": lambda c: [ClippedSum(c), Norms()],
    "automatic": lambda c: [ClippedSum(c, style="automatic"), WeightedSum()],
    "clipped by parameter": lambda c: [ClippedSum(c, per="parameter", style="automatic")],
    "products": lambda c: [Dots(count=2), Gram()],
    "moments": lambda c: [SecondMoment(centered=True), Projection(rank=2)],
}  # fmt: skip
"""By name, from a bound for clipping."""


def given(quantities: list[Any], parameters: Mapping[str, Tensor], batch: int) -> dict[str, Any]:
    """The further arguments of a call, the same at every call."""
    generator = torch.Generator().manual_seed(batch)
    reads = {word for q in quantities for word in q.reads}
    found: dict[str, Any] = {}
    if "weights" in reads:
        found["weights"] = torch.randn(batch, generator=generator, dtype=torch.float64)
    if "directions" in reads:
        (count,) = [q.count for q in quantities if isinstance(q, Dots)]
        lead = [] if count is None else [count]
        found["directions"] = {
            n: torch.randn([*lead, *p.shape], generator=generator, dtype=torch.float64) for n, p in parameters.items()
        }
    return found


def has_groups(name: str) -> bool:
    """Whether a program is asked of groups of samples, too: every fourth one, each by another graph."""
    return zlib.crc32(name.encode()) % 4 == 0


def groups(name: str, batch: int) -> tuple[Tensor, int]:
    """The group of each sample, in any order, and how many there are: some empty, one of all, or samples in none."""
    draw = random.Random(f"{name} {batch}")
    names = draw.choice([[0], [-1, 0, 2], [1], list(range(batch))])
    ids = [draw.choice(names) for _ in range(batch)]
    return torch.tensor(ids), max(*ids, 0) + 1 + draw.randrange(2)
