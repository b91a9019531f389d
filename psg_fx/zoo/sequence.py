"""Sequence models: a decoder-only language model, an LSTM classifier, a transformer encoder, and a small MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx.zoo.block import TransformerBlock


class CausalBlock(TransformerBlock):
    """A transformer block with causal attention."""

    def attend(self, qkv: Tensor) -> Tensor:
        """`[B, T, 3 D]` -> `[B, heads, T, D/heads]`."""
        b, t, d = *qkv.shape[:2], qkv.shape[2] // 3
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in qkv.split(d, dim=2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class GPT(nn.Module):
    """A decoder-only language model: token ids `[B, T]` -> logits `[B, T, V]`.

    The position table is a bare parameter `[1, max_tokens, D]`, sliced to the length at hand. With `tied=True` the
    head is the token embedding itself, so one parameter is used by two unlike operators.
    """

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 256,
        heads: int = 8,
        max_tokens: int = 128,
        vocabulary: int = 1000,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} must divide width={width}")
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, max_tokens, width))
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """`[B, T]` -> `[B, T, V]`."""
        h = self.embed(ids) + self.position[:, : ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, both sides flattened: logits `[B, T, V]`, targets `[B, T]` -> scalar."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class LSTMClassifier(nn.Module):
    """Embedding, stacked LSTM, linear head on the last step: token ids `[B, T]` -> logits `[B, classes]`."""

    def __init__(
        self,
        *,
        vocabulary: int = 1000,
        width: int = 64,
        hidden: int = 128,
        layers: int = 2,
        classes: int = 4,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """`[B, T]` -> `[B, classes]`."""
        outputs, _ = self.lstm(self.embed(ids))
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]


class EncoderClassifier(nn.Module):
    """`nn.TransformerEncoder`, mean over time, linear head; `batch_first` decides where the samples lie.

    Features `[B, T, D]` (or `[T, B, D]` with `batch_first=False`) -> logits `[B, classes]`.
    """

    def __init__(
        self,
        *,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        hidden: int = 128,
        classes: int = 4,
        dropout: float = 0.0,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        self.time_dim = 1 if batch_first else 0

    def forward(self, features: Tensor) -> Tensor:
        """`[B, T, D]` or `[T, B, D]` -> `[B, classes]`."""
        return self.head(self.encoder(features).mean(self.time_dim))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two hidden layers with tanh: `[B, inputs]` -> `[B, classes]`."""

    def __init__(self, *, inputs: int = 16, hidden: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs]` -> `[B, classes]`."""
        h = torch.tanh(self.fc1(x))
        h = torch.tanh(self.fc2(h))
        return self.fc3(h)  # type: ignore[no-any-return]
