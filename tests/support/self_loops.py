"""Layers of graphs that add self-loops by themselves, in plain torch, with the ops of PyTorch Geometric's utilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def loops_of(edge_index: Tensor, nodes: int) -> Tensor:
    """An edge from each node to itself, `[2, N]`."""
    return torch.arange(0, nodes, dtype=torch.long, device=edge_index.device).view(1, -1).repeat(2, 1)


def add_self_loops(
    edge_index: Tensor, edge_attr: Tensor | None, nodes: int, fill: float | str = 1.0
) -> tuple[Tensor, Tensor | None]:
    """`torch_geometric.utils.add_self_loops`; fill: a number, or how attributes of incoming edges are reduced."""
    if edge_attr is not None:
        if isinstance(fill, str):
            loop_attr = scatter(edge_attr, edge_index[1], nodes, fill)
        else:
            loop_attr = edge_attr.new_full((nodes, *edge_attr.shape[1:]), fill)
        edge_attr = torch.cat([edge_attr, loop_attr], 0)
    return torch.cat([edge_index, loops_of(edge_index, nodes)], 1), edge_attr


def remove_self_loops(edge_index: Tensor, edge_attr: Tensor | None) -> tuple[Tensor, Tensor | None]:
    mask = edge_index[0] != edge_index[1]
    return edge_index[:, mask], None if edge_attr is None else edge_attr[mask]


def add_remaining_self_loops(
    edge_index: Tensor, edge_attr: Tensor | None, nodes: int, fill: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    mask = edge_index[0] != edge_index[1]
    loops = loops_of(edge_index, nodes)
    if edge_attr is not None:
        loop_attr = edge_attr.new_full((nodes, *edge_attr.shape[1:]), fill)
        inverse = ~mask
        loop_attr[edge_index[0][inverse]] = edge_attr[inverse]
        edge_attr = torch.cat([edge_attr[mask], loop_attr], 0)
    return torch.cat([edge_index[:, mask], loops], 1), edge_attr


def _like(index: Tensor, x: Tensor) -> Tensor:
    return index.view(-1, *[1] * (x.ndim - 1)).expand_as(x)


def scatter(x: Tensor, index: Tensor, size: int, reduce: str = "sum") -> Tensor:
    """`torch_geometric.utils.scatter` along dim 0."""
    out = x.new_zeros((size, *x.shape[1:]))
    if reduce == "sum":
        return out.scatter_add_(0, _like(index, x), x)
    if reduce == "mean":
        count = x.new_zeros(size).scatter_add_(0, index, x.new_ones(x.size(0))).clamp(min=1)
        return out.scatter_add_(0, _like(index, x), x) / count.view(-1, *[1] * (x.ndim - 1)).expand_as(out)
    return out.scatter_reduce_(0, _like(index, x), x, {"max": "amax", "min": "amin"}[reduce], include_self=False)


def softmax(x: Tensor, index: Tensor, size: int) -> Tensor:
    """`torch_geometric.utils.softmax`: over the rows with the same index."""
    most = scatter(x.detach(), index, size, "max")
    out = (x - most.index_select(0, index)).exp()
    return out / (scatter(out, index, size) + 1e-16).index_select(0, index)


class GCNConv(nn.Module):
    """X' = D^-½ (A + 1) D^-½ X W + b; remaining: loops that there are already are not added a second time."""

    def __init__(self, width: int, out: int, remaining: bool = True) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(width, out, bias=False), nn.Parameter(torch.randn(out))
        self.remaining = remaining

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        nodes = x.size(0)
        loops = add_remaining_self_loops if self.remaining else add_self_loops
        edge_index, edge_weight = loops(edge_index, edge_weight, nodes)
        if edge_weight is None:
            edge_weight = torch.ones((edge_index.size(1),), dtype=x.dtype, device=x.device)
        row, col = edge_index[0], edge_index[1]
        degree = scatter(edge_weight, col, nodes)
        scale = degree.pow_(-0.5)
        scale.masked_fill_(scale == float("inf"), 0)
        weight = scale[row] * edge_weight * scale[col]
        message = weight.view(-1, 1) * self.lin(x).index_select(0, row)
        return scatter(message, col, nodes) + self.bias


class GATConv(nn.Module):
    """Attention over the edges into each node; two: GATv2, whose attention looks at sums of both ends."""

    def __init__(self, width: int, out: int, heads: int = 2, edges: int = 0, two: bool = False, removes: bool = True,
                 fill: float | str = "mean", dropout: float = 0.0) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.out, self.two, self.removes, self.fill, self.dropout = heads, out, two, removes, fill, dropout
        self.lin = nn.Linear(width, heads * out, bias=False)
        self.lin_edge = nn.Linear(edges, heads * out, bias=False) if edges else None
        self.source, self.target, self.edge = (nn.Parameter(torch.randn(1, heads, out)) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(heads * out))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        nodes, h = x.size(0), self.lin(x).view(-1, self.heads, self.out)
        if self.removes:
            edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        edge_index, edge_attr = add_self_loops(edge_index, edge_attr, nodes, self.fill)
        row, col = edge_index
        e = None
        if edge_attr is not None and self.lin_edge is not None:
            e = self.lin_edge(edge_attr).view(-1, self.heads, self.out)
        if self.two:
            s = h.index_select(0, row) + h.index_select(0, col)
            scores = (F.leaky_relu(s if e is None else s + e, 0.2) * self.source).sum(-1)
        else:
            source, target = (h * self.source).sum(-1), (h * self.target).sum(-1)
            scores = source.index_select(0, row) + target.index_select(0, col)
            scores = F.leaky_relu(scores if e is None else scores + (e * self.edge).sum(-1), 0.2)
        alpha = F.dropout(softmax(scores, col, nodes), self.dropout, self.training)
        out = scatter(alpha.unsqueeze(-1) * h.index_select(0, row), col, nodes)
        return out.view(-1, self.heads * self.out) + self.bias


class Layers(nn.Module):
    """One layer or two, summed over each graph."""

    def __init__(self, first: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.head = first, second, nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        h = torch.tanh(self.norm(self.first(x, edge_index)))
        h = h if self.second is None else torch.tanh(self.second(h, edge_index))
        return self.head(h.new_zeros(count, 6).index_add(0, batch, h))


class WithAttributes(Layers):
    """The same with a value or several for each edge."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, count: int) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.norm(self.first(x, edge_index, edge_attr)))
        h = h if self.second is None else torch.tanh(self.second(h, edge_index, edge_attr))
        return self.head(h.new_zeros(count, 6).index_add(0, batch, h))


class Weighted(nn.Module):
    """A GCN with weights of edges that a parameter makes of the given ones, summed over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.layer, self.head = nn.Linear(1, 1), GCNConv(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, batch: Tensor, count: int) -> Tensor:
        weight = torch.sigmoid(self.weigh(edge_weight.unsqueeze(1))).squeeze(1)
        h = torch.tanh(self.layer(x, edge_index, weight))
        return self.head(h.new_zeros(count, 5).index_add(0, batch, h))
