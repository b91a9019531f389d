"""Rows: embeddings and tables."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import B, Case, Shape


class PositionTable(nn.Module):
    """Token embedding and an `nn.Embedding` of positions, which reads no data."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(9, 4, padding_idx=padding)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class TiedHead(nn.Module):
    """The token embedding is the head: two unlike uses of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def _embed(name: str, ids: Shape, **options: Any) -> Case:
    vmap = options.pop("vmap", True)
    function = lambda ids, w: F.embedding(ids, w, **options)  # noqa: E731
    return Case(f"embedding/{name}", function, x=None, ids=ids, params={"w": (7, 4)}, vmap=vmap)


def _directions(ids: Tensor, w: Tensor) -> Tensor:
    """Gradients at padded places are no numbers, of which an embedding has none."""
    padded = (ids == 2).unsqueeze(-1)
    rows = F.embedding(ids, w, padding_idx=2) * ~padded
    return (rows / rows.norm(dim=-1, keepdim=True)).masked_fill(padded, 0.0)


def _experts(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Each token by the matrix of the expert that it names."""
    return torch.bmm(x.reshape(-1, 1, 4), w[ids.reshape(-1)]).view(*ids.shape, -1)


def _routed(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """The same with tokens in order of their experts; torch's grouped product has no float64 on a CPU."""
    flat, ids = x.flatten(0, -2), ids.flatten()
    order, counts = ids.argsort(), (ids[:, None] == torch.arange(len(w), device=ids.device)).sum(0)
    rows, offs = flat[order], counts.cumsum(0).to(torch.int32)
    if torch.compiler.is_exporting():
        y = torch._grouped_mm(rows, w, offs)
    else:
        y = torch.cat([r @ w[e] for e, r in enumerate(rows.split(counts.tolist()))])
    return y[order.argsort()].unflatten(0, x.shape[:-1])


EMBEDDING = [
    _embed("seq", (B, 5)),
    _embed("one-token", (B,)),
    _embed("one-position", (B, 1)),
    _embed("two-middle-dims", (B, 2, 3)),
    _embed("padding", (B, 5), padding_idx=2),
    Case("embedding/padding-of-no-number", _directions, x=None, ids=(B, 5), params={"w": (7, 4)}),
    _embed("negative-padding", (B, 5), padding_idx=-3),
    Case("embedding/repeated", lambda ids, w: F.embedding(ids, w), x=None, ids=(B, 6), classes=2, params={"w": (7, 4)}),
    Case("embedding/time-major", lambda ids, w: F.embedding(ids, w), x=None, ids=(5, B), params={"w": (7, 4)},
         batch_dim=1, out_dim=1),
    Case("embedding/twice", lambda ids, w: F.embedding(ids, w) * F.embedding(ids.flip(1), w), x=None, ids=(B, 5),
         params={"w": (7, 4)}),
    Case("embedding/scaled", lambda ids, w: F.embedding(ids, w * 2.0), x=None, ids=(B, 5), params={"w": (7, 4)}),
    Case("embedding/position-table", x=None, ids=(B, 5), module=PositionTable),
    Case("embedding/padded-position-table", x=None, ids=(B, 5), module=lambda: PositionTable(padding=1)),
    Case("embedding/raw-positions", lambda ids, w, pos: F.embedding(ids, w) + pos[:, : ids.shape[1]], x=None,
         ids=(B, 5), params={"w": (7, 4), "pos": (1, 9, 4)}),
    Case("embedding/tied-head", x=None, ids=(B, 5), module=TiedHead),
    Case("embedding/tied-head-one-position", x=None, ids=(B, 1), module=TiedHead),
    Case("embedding_bag/sum", lambda ids, w: F.embedding_bag(ids, w, mode="sum"), x=None, ids=(B, 5),
         params={"w": (7, 4)}, vmap=False, covers=("embedding",)),
    Case("embedding_bag/mean", lambda ids, w: F.embedding_bag(ids, w, mode="mean"), x=None, ids=(B, 5),
         params={"w": (7, 4)}, vmap=False, covers=("embedding",)),
    Case("embedding_bag/max-padding", lambda ids, w: F.embedding_bag(ids, w, mode="max", padding_idx=2), x=None,
         ids=(B, 5), params={"w": (7, 4)}, vmap=False, covers=("embedding",)),
    Case("index/rows", lambda ids, w: w[ids], x=None, ids=(B, 5), params={"w": (7, 4)}),
    Case("index/columns", lambda ids, w: w[:, ids], x=None, ids=(B, 5), params={"w": (4, 7)}, out_dim=1),
    Case("expert_mm/sorted", _routed, x=(B, 5, 4), ids=(B, 5), classes=3, params={"w": (3, 4, 2)}, vmap=False),
    Case("expert_mm/one-token", _routed, x=(B, 4), ids=(B,), classes=3, params={"w": (3, 4, 2)}, vmap=False),
    Case("index/experts", _experts, x=(B, 5, 4), ids=(B, 5), classes=3, params={"w": (3, 4, 2)}),
    Case("index/pairs", lambda ids, w: w[ids, ids.flip(1)], x=None, ids=(B, 5), params={"w": (7, 7)}, fallback=("w",)),
    Case("index_select/rows", lambda ids, w: w.index_select(0, ids), x=None, ids=(B,), params={"w": (7, 4)},
         vmap=False),
    Case("expand/gathered-columns", lambda ids, w: w.expand(ids.shape[0], 4, 7).gather(2, ids), x=None, ids=(B, 4, 2),
         params={"w": (4, 7)}),
    Case("gather/vector", lambda ids, w: w.gather(0, ids) * w.sum(), x=None, ids=(B,), params={"w": (7,)}, vmap=False),
    Case("gather/rows", lambda ids, w: w.gather(0, ids), x=None, ids=(B, 4), params={"w": (7, 4)}, vmap=False),
    Case("gather/fewer-columns", lambda ids, w: w.gather(-2, ids), x=None, ids=(2, B, 3), params={"w": (2, 7, 4)},
         vmap=False, batch_dim=1, out_dim=1),
    Case("take/pairs", lambda ids, w: torch.take(w, ids - 3), x=None, ids=(B, 5), params={"w": (3, 4)}, vmap=False),
    Case("one_hot/matmul", lambda ids, w: F.one_hot(ids, 7).to(w.dtype) @ w, x=None, ids=(B, 5), params={"w": (7, 4)},
         vmap=False, covers=("matmul",)),
]  # fmt: skip
