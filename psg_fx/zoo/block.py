"""The transformer block that the models share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """Pre-norm transformer block with one fused qkv projection: `[B, T, D]` -> `[B, T, D]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, qkv: Tensor) -> Tensor:
        """`[B, T, 3 D]` -> `[B, heads, T, D/heads]`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        attended = self.attend(self.qkv(self.norm1(x)))
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]
