"""Documents packed side by side into one sequence, and small transformers that read them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import Rows
from support.rows_of_samples import Batch, Part, ids_of

TOKENS = Rows("ids", dim=1)
BATCH_DIM = ({"tokens": TOKENS, "positions": TOKENS, "ids": TOKENS}, {"labels": TOKENS, "ids": TOKENS, "count": 0})


def documents(lengths: list[int], order: str = "sorted", seed: int = 0, batch_dim: Any = BATCH_DIM) -> Batch:
    """Documents of so many tokens, `[1, R]`; shuffled: tokens of all documents in any order."""
    drawn = torch.Generator().manual_seed(seed)
    ids = ids_of(lengths, order)
    tokens, labels = (torch.randint(7, (len(ids),), generator=drawn) for _ in range(2))
    labels[torch.rand(len(ids), generator=drawn) < 0.2] = -100
    positions = torch.zeros_like(ids)
    for s in range(len(lengths)):
        positions[ids == s] = torch.arange(lengths[s])

    def part(rows: Tensor, own: Tensor, count: int) -> Part:
        inputs = {"tokens": tokens[rows][None], "positions": positions[rows][None], "ids": own[None]}
        return Part(inputs, {"labels": labels[rows][None], "ids": own[None], "count": count})  # type: ignore[arg-type]

    everything = torch.arange(len(ids))
    alone = [(ids == s).nonzero()[:, 0] for s in range(len(lengths))]
    return Batch(
        part(everything, ids, len(lengths)), tuple(part(rows, torch.zeros_like(rows), 1) for rows in alone), batch_dim
    )


MANY = [([3, 5, 2], "sorted"), ([3, 0, 5, 2], "sorted"), ([4, 1, 2], "shuffled"), ([6], "sorted"), ([1, 1], "sorted")]


class Packed(nn.Module):
    """One layer of causal attention within documents, and others that see all of a document.

    kind: how masks are made, in the first layer and in the others.
    """

    def __init__(
        self, width: int = 8, heads: int = 2, kind: tuple[str, str] = ("bool", "bool"), depth: int = 2
    ) -> None:
        super().__init__()
        self.heads, self.kind = heads, kind
        self.tokens, self.positions = nn.Embedding(7, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def mask(self, ids: Tensor, causal: bool) -> Tensor:
        same = ids[:, :, None] == ids[:, None, :]
        size = ids.shape[1]
        if causal:
            same = same & torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
        same, kind = same[:, None], self.kind[0 if causal else 1]
        if kind == "bool":
            return same
        low = -torch.inf if kind == "inf" else torch.finfo(torch.float64).min
        return torch.zeros(same.shape, dtype=torch.float64).masked_fill(~same, low)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, tokens: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for k, layer in enumerate(self.layers):
            q, key, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in layer(self.norm(x)).chunk(3, -1))
            x = x + self.out(self.attention(q, key, v, self.mask(ids, k == 0)).transpose(1, 2).flatten(2))
        return x @ self.tokens.weight.T


def losses(out: Tensor, labels: Tensor, ids: Tensor, count: int) -> Tensor:
    """Of each document: the mean over its tokens that have a label."""
    each = F.cross_entropy(out[0], labels[0], reduction="none", ignore_index=-100)
    total = each.new_zeros(count).index_add(0, ids[0], each)
    kept = each.new_zeros(count).index_add(0, ids[0], (labels[0] != -100).to(each.dtype))
    return total / kept.clamp(min=1)


def made(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    return Packed(**given).double()
