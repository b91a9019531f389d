"""Whether the backward of a function is linear in the gradient that it is given, as that of every op is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.torch_private.modes import no_modes


def is_additive(run: Callable[..., Any], like: Sequence[torch.Tensor]) -> bool:
    """Whether the backward of a function from `differentiable` is linear in the gradient, asked of it with numbers: at
    a random place, for random gradients that are small, of size 1, and large.  Whole numbers are zeros, which places
    may be, and ones, which hide nothing as a mask.
    """
    if not _is_additive(run, like, 0):
        return False
    try:
        return all(t.is_floating_point() for t in like) or _is_additive(run, like, 1)
    except Exception:  # there is no such place
        return True


def _is_additive(run: Callable[..., Any], like: Sequence[torch.Tensor], number: int) -> bool:
    """With this for whole numbers."""
    seed = torch.Generator().manual_seed(0)

    def drawn(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(tuple(t.shape), generator=seed, dtype=t.dtype) if t.is_floating_point() else t

    with no_modes():
        given = [drawn(torch.full(tuple(map(int, t.shape)), number, dtype=t.dtype)) for t in like]
        learning = [k for k, t in enumerate(given) if t.is_floating_point()]

        def call(*floats: torch.Tensor) -> list[torch.Tensor]:
            here = dict(zip(learning, floats, strict=True))
            return pytree.tree_leaves(run(*(here.get(k, t) for k, t in enumerate(given))))

        outputs, pull = torch.func.vjp(call, *(given[k] for k in learning))[:2]
        a, b = ([drawn(o) for o in outputs] for _ in range(2))
        rounding = max(torch.finfo(given[k].dtype).eps for k in learning)
        for scale in (0.0, 1e-6, 1.0, 1e6) if rounding < 1e-5 else (0.0, 1e-3, 1.0, 1e3):
            parts = pull([scale * t for t in a]), pull([scale * t for t in b])
            whole = pull([scale * (t + u) for t, u in zip(a, b, strict=True)])
            near = 1e-3 + 8 * rounding
            for one, other, both in zip(*parts, whole, strict=True):
                if not torch.allclose(one + other, both, rtol=near, atol=near * scale, equal_nan=True):
                    return False
    return True
