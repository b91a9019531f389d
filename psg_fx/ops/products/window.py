"""How a convolution over images reads its input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Window(NamedTuple):
    """Groups of channels, and of each of both dims the kernel's size, its steps, what is padded and dilated."""

    groups: int
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def entries(self) -> int:
        """Of a patch, for each channel."""
        return math.prod(self.kernel)

    def out_space(self, space: Sequence[Any]) -> tuple[Any, ...]:
        """The sizes of the output."""
        each = zip(space, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((size + 2 * pad - (kernel - 1) * apart - 1) // step + 1 for size, kernel, step, pad, apart in each)

    def patches(self, x: torch.Tensor) -> torch.Tensor:
        """x[n, g·c, h, w] -> [n·g, t, i], t = (h, w) of the output, i = (c, kernel)."""
        found = F.unfold(x, *map(tuple, (self.kernel, self.dilation, self.padding, self.stride)))
        return found.reshape(x.shape[0] * self.groups, -1, found.shape[2]).mT
