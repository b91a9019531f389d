"""Pools of a single window: torch takes a mean, laid out by `as_strided` where images are channels-last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from psg_fx.op_table import at_capture

Pool = Callable[..., Tensor]


def _by_mean(pool: Pool, ndim: int) -> Pool:
    def adaptive_avg_pool(input: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
        if input.dim() not in (ndim + 1, ndim + 2) or len(sizes := _sizes(input, output_size, ndim)) != ndim:
            return pool(input, output_size)
        single = all(isinstance(size, int) and size == 1 for size in sizes)
        return input.mean(tuple(range(-ndim, 0)), keepdim=True) if single else pool(input, output_size)

    return adaptive_avg_pool


def _sizes(input: Tensor, output_size: int | Sequence[int | None], ndim: int) -> Sequence[Any]:
    """Of each dim of windows; None stands for as many as there are elements."""
    given = (output_size,) * ndim if isinstance(output_size, int) else output_size
    return [n if size is None else size for n, size in zip(input.shape[-ndim:], given, strict=False)]


for _ndim, _pool in enumerate((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), 1):
    at_capture(_pool)(_by_mean(_pool, _ndim))
