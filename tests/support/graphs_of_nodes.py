"""Small graphs as batches of nodes and edges, and networks on them in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import Rows
from support.rows_of_samples import Batch, Part, ids_of, renumbered

EDGES = Rows(None, dim=1)
BATCH_DIM = ((Rows("batch"), EDGES, Rows("batch"), 0), 0)
"""Of `model(x, edge_index, batch, count)` and targets `[B]`."""


def graphs(sizes: list[int], edges: list[int], order: str = "sorted", seed: int = 0, features: int = 4) -> Batch:
    """Graphs with so many nodes and edges."""
    drawn = torch.Generator().manual_seed(seed)
    ids = ids_of(sizes, order)
    x = torch.randn(len(ids), features, generator=drawn, dtype=torch.float64)
    own = [(ids == s).nonzero()[:, 0] for s in range(len(sizes))]
    ends = [n[torch.randint(len(n), (2, e), generator=drawn)] if e else torch.zeros(2, 0, dtype=torch.int64)
            for n, e in zip(own, edges, strict=True)]  # fmt: skip
    edge_index = torch.cat(ends, 1)
    if order == "shuffled":
        edge_index = edge_index[:, torch.randperm(edge_index.shape[1], generator=drawn)]
    y = torch.randint(3, (len(sizes),), generator=drawn)
    alone = []
    for s in range(len(sizes)):
        mine = ids == s
        among = mine[edge_index[0]]
        inputs = (x[mine], renumbered(edge_index[:, among], mine), torch.zeros(int(mine.sum()), dtype=torch.int64), 1)
        alone.append(Part(inputs, (y[s : s + 1],)))
    return Batch(Part((x, edge_index, ids, len(sizes)), (y,)), tuple(alone), BATCH_DIM)


def with_attributes(given: Batch, width: int) -> Batch:
    """A positive value for each edge, or several."""
    size = (given.whole.inputs[1].shape[1], width) if width else (given.whole.inputs[1].shape[1],)
    attr = torch.rand(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5
    ids = given.whole.inputs[2][given.whole.inputs[1][0]]

    def part(of: Part, attr: Tensor) -> Part:
        x, edge_index, batch, count = of.inputs
        return Part((x, edge_index, attr, batch, count), of.targets)

    alone = tuple(part(p, attr[ids == s]) for s, p in enumerate(given.alone))
    dims = ((Rows("batch"), EDGES, Rows(None), Rows("batch"), 0), 0)
    return replace(given, whole=part(given.whole, attr), alone=alone, batch_dim=dims)


MANY: list[tuple[list[int], list[int], str]] = [
    ([3, 0, 5, 2], [4, 0, 7, 1], "sorted"), ([3, 0, 5, 2], [4, 0, 7, 1], "shuffled"), ([6], [5], "sorted"),
    ([0, 4, 0], [0, 9, 0], "sorted"), ([2, 2, 2, 2, 2, 2], [3, 0, 1, 2, 3, 4], "shuffled"), ([3, 2], [0, 0], "sorted"),
    ([1, 1], [1, 1], "sorted"),
]  # fmt: skip
"""Nodes and edges of each graph: empty ones, one alone, all nodes in one, no edges."""


class OneLayer(nn.Module):
    """Messages along edges once, summed over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        h = torch.tanh(self.layer(x))
        h = h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return self.head(h.new_zeros(count, h.shape[1]).index_add(0, batch, h))


class GIN(nn.Module):
    """x_v = MLP((1 + ε) x_v + Σ x_u), summed over each graph (Xu et al. 2019, arXiv:1810.00826)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5))
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.eps, self.head = nn.Parameter(torch.tensor([0.1, 0.2])), nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        src, dst = edge_index[0], edge_index[1]
        for k, mlp in enumerate((self.first, self.second)):
            x = mlp((1 + self.eps[k]) * x + torch.zeros_like(x).index_add(0, dst, x[src]))
        return self.head(x.new_zeros(count, x.shape[1]).index_add(0, batch, x))


class CountingGIN(GIN):
    """It counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        self.calls.add_(1)
        return super().forward(x, edge_index, batch, count)


class GCN(nn.Module):
    """X = Â X W with Â = D^-½ (A + 1) D^-½, averaged over each graph (Kipf & Welling 2017, arXiv:1609.02907)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        src, dst = edge_index
        degree = x.new_ones(x.shape[0]).scatter_add(0, dst, x.new_ones(dst.shape[0]))
        scale = degree.rsqrt()
        for layer in (self.first, self.second):
            h = layer(x) * scale[:, None]
            x = (h + torch.zeros_like(h).index_add(0, dst, h.index_select(0, src))) * scale[:, None]
            x = torch.tanh(x)
        nodes = x.new_zeros(count).index_add(0, batch, x.new_ones(x.shape[0]))
        mean = x.new_zeros(count, x.shape[1]).scatter_add(0, batch[:, None].expand_as(x), x)
        return self.head(mean / nodes.clamp(min=1)[:, None])


class GraphSAGE(nn.Module):
    """x_v = W x_v + U max_u x_u or mean_u x_u (Hamilton et al. 2017, arXiv:1706.02216); the largest of each graph."""

    def __init__(self, reduce: str = "amax") -> None:
        super().__init__()
        self.reduce, self.norm = reduce, nn.LayerNorm(5)
        self.own, self.others, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        src, dst = edge_index.unbind(0)
        index = dst.unsqueeze(-1).expand(-1, x.shape[1])
        around = torch.zeros_like(x).scatter_reduce(0, index, x.gather(0, src[:, None].expand(-1, 4)), self.reduce,
                                                    include_self=False)  # fmt: skip
        x = self.norm(torch.tanh(self.own(x) + self.others(around)))
        pooled = x.new_zeros(count, 5).scatter_reduce(0, batch[:, None].expand_as(x), x, "amax", include_self=False)
        return self.head(pooled)


class GAT(nn.Module):
    """Attention over the edges into each node, with two heads (Velickovic et al. 2018, arXiv:1710.10903)."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(4, 2 * 3)
        self.source, self.target = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        src, dst = edge_index[0], edge_index[1]
        value = self.value(x).unflatten(-1, (2, 3))
        scores = (value * self.source).sum(-1)[src] + (value * self.target).sum(-1)[dst]
        scores = F.leaky_relu(scores, 0.2)
        index = dst[:, None].expand(-1, 2)
        most = scores.new_zeros(x.shape[0], 2).scatter_reduce(0, index, scores, "amax", include_self=False)
        weight = (scores - most[dst].detach()).exp()
        total = weight.new_zeros(x.shape[0], 2).index_put((dst,), weight, accumulate=True)
        weight = weight / total[dst]
        h = torch.zeros_like(value).index_add(0, dst, weight[..., None] * value[src]).flatten(1)
        return self.head(h.new_zeros(count, 6).index_add(0, batch, torch.tanh(h)))


class EdgeMLP(nn.Module):
    """x_v = Σ MLP(x_u, x_v): a layer on the edges, shared with the nodes and with the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        src, dst = edge_index[0], edge_index[1]
        message = self.shared(torch.tanh(self.first(torch.cat([x[src], x[dst]], -1))))
        x = self.shared(torch.tanh(torch.zeros_like(x).index_add(0, dst, message)))
        return self.head(self.shared(x.new_zeros(count, 4).index_add(0, batch, torch.tanh(x))))


def made(kind: Any, *given: Any) -> nn.Module:
    """The network in float64, with the same weights every time."""
    torch.manual_seed(0)
    found: nn.Module = kind(*given)
    return found.double()


def batches() -> list[Batch]:
    """All of `MANY`."""
    return [graphs(sizes, edges, order, seed) for seed, (sizes, edges, order) in enumerate(MANY)]


def losses(out: Tensor, y: Tensor) -> Tensor:
    """The loss of each graph."""
    return F.cross_entropy(out, y, reduction="none")
