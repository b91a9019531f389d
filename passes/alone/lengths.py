"""Samples cut to fewer steps than they have, as later batches hold them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from psg_fx.graph import facts

_MOST = 8

Sizes = Collection[tuple[int, int]]
"""Of each packed sequence: to how many steps it was padded, and how many it has."""


def fewer(steps: int) -> list[int]:
    """Some numbers of steps below this one, 1 among them; all, where these are few."""
    some = torch.linspace(1, steps - 1, min(steps - 1, _MOST)).round().int().tolist() if steps > 1 else []
    return list(dict.fromkeys(some))


def cut(inputs: Sequence[Tensor], sizes: Sizes, steps: int, known: Sequence[Tensor] = ()) -> list[Tensor]:
    """A sample with at most so many steps.  Numbers that say how many it has say the new one, and what has as many
    steps as it was padded to has behind them what its padding has.

    known: inputs that are lengths.
    """
    return [_cut(t, sizes, steps, any(t is length for length in known)) for t in inputs]


def _cut(tensor: Tensor, sizes: Sizes, steps: int, is_length: bool) -> Tensor:
    if is_length:
        return tensor.clamp(max=steps)
    for padded, own in sizes:
        if tensor.numel() == 1 and not facts.is_differentiable(tensor) and tensor.item() == own:
            return torch.full_like(tensor, min(own, steps))
        if own < padded and padded in tensor.shape:  # else there is no padding
            tensor = tensor.clone()
            in_steps = tensor.movedim(tensor.shape.index(padded), 0)
            in_steps[min(own, steps) :] = in_steps[-1].clone()
            return tensor
    return tensor


__all__ = ["Sizes", "cut", "fewer"]
