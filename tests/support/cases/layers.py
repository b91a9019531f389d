"""Rows: ops without a rule, and whole layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import B, Case


class LastHidden(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on itself, samples in dim 0 or 1."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


LAYERS = [
    Case("expand/attention-key", lambda x, k: F.scaled_dot_product_attention(x, k.expand(x.shape[0], 5, 4), x),
         x=(B, 5, 4), params={"k": (5, 4)}),
    Case("fallback/attention-memory", lambda x, k, v: F.scaled_dot_product_attention(x, k.unsqueeze(0), v.unsqueeze(0)),
         x=(B, 5, 4), params={"k": (3, 4), "v": (3, 4)}, fallback=("k", "v")),
    Case("fallback/cdist", lambda x, c: torch.cdist(x, c.unsqueeze(0)), x=(B, 5, 4), params={"c": (3, 4)},
         fallback=("c",)),
    Case("fill/parameter", lambda x, p: x * torch.zeros_like(x).fill_(p), params={"p": ()}),
    Case("fallback/cosine", lambda x, c: F.cosine_similarity(x.unsqueeze(1), c, dim=-1), params={"c": (3, 4)},
         fallback=("c",)),
    Case("expand/cat-params-and-data", lambda x, p: torch.cat([x, p.expand(x.shape[0], 2, 4)], 1).cumsum(1),
         x=(B, 5, 4), params={"p": (2, 4)}),
    Case("add/grid-bias", lambda x, p: F.pad(x, (1, 1)) + F.pad(p, (1, 1)), x=(B, 4), params={"p": (4,)}),
    Case("layers/lstm", x=(B, 4, 4), module=lambda: LastHidden(nn.LSTM, batch_first=True), vmap=False),
    Case("layers/lstm-two-ways", x=(4, B, 4), module=lambda: LastHidden(nn.LSTM, num_layers=2, bidirectional=True),
         batch_dim=1, out_dim=1, vmap=False),
    Case("layers/gru", x=(B, 4, 4), module=lambda: LastHidden(nn.GRU, batch_first=True), vmap=False),
    Case("layers/rnn", x=(B, 4, 4), module=lambda: LastHidden(nn.RNN, batch_first=True, nonlinearity="relu"),
         vmap=False),
    Case("layers/attention", x=(B, 5, 4), module=lambda: SelfAttention(True)),
    Case("layers/attention-time-major", x=(5, B, 4), module=lambda: SelfAttention(False), batch_dim=1, out_dim=1),
    Case("layers/attention-bias-kv", x=(5, B, 4), module=lambda: SelfAttention(False, add_bias_kv=True), batch_dim=1,
         out_dim=1, fallback=("attention.bias_k", "attention.bias_v")),
    Case("layers/bilinear", x=(B, 4), more=((B, 5),), module=lambda: nn.Bilinear(4, 5, 2)),
]  # fmt: skip
