"""Layers of graphs that add self-loops by themselves: rows of edges and of nodes one behind the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from psg_fx import Rows
from support.graphs_of_nodes import EDGES, batches, losses, made
from support.rows_of_samples import Batch, Part, check, usual
from support.self_loops import GATConv, GCNConv, Layers, WithAttributes, scatter

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: Layers(GCNConv(4, 6), GCNConv(6, 6)),
    "gcn/all": lambda: Layers(GCNConv(4, 6, False), GCNConv(6, 6, False)),
    "gat": lambda: Layers(GATConv(4, 3), GATConv(6, 3)),
    "gat/two": lambda: Layers(GATConv(4, 3, two=True), GATConv(6, 3, two=True)),
    "gat/all": lambda: Layers(GATConv(4, 3, removes=False), GATConv(6, 3, two=True, removes=False)),
    "both": lambda: Layers(GATConv(4, 3), GCNConv(6, 6, False)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """With graphs that have self-loops already, some twice, and with graphs that have no edges or no nodes."""
    check(made(LAYERS[name]), losses, batches(), quantities=usual())


@pytest.mark.parametrize("name", ["gcn", "gat/two"])
def test_every_quantity(name: str) -> None:
    check(made(LAYERS[name]), losses, batches())


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


ATTRIBUTES: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "gcn/all": (0, lambda: WithAttributes(GCNConv(4, 6, False), GCNConv(6, 6, False))),
    "gat/mean": (2, lambda: WithAttributes(GATConv(4, 3, edges=2), GATConv(6, 3, edges=2))),
    "gat/number": (2, lambda: WithAttributes(GATConv(4, 3, edges=2, fill=0.5), GATConv(6, 3, edges=2, fill=0.1))),
    "gat/max": (2, lambda: WithAttributes(GATConv(4, 3, edges=2, fill="max"), GATConv(6, 3, edges=2, two=True))),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_edges(name: str) -> None:
    width, model = ATTRIBUTES[name]
    check(made(model), losses, [with_attributes(b, width) for b in batches()], quantities=usual())


class Custom(nn.Module):
    """A layer in which something is done with the rows of edges and self-loops."""

    def __init__(self, layer: Callable[..., Tensor], masked: bool = False) -> None:
        super().__init__()
        self.layer, self.masked = layer, masked
        self.lin, self.edge, self.norm, self.head = nn.Linear(4, 4), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        if self.masked:
            edge_index = edge_index[:, edge_index[0] != edge_index[1]]
        loops = torch.arange(x.shape[0])
        row, col = torch.cat([edge_index, torch.stack([loops, loops])], 1)
        h = self.layer(self, self.lin(x), row, col)
        return self.head(h.new_zeros(count, 4).index_add(0, batch, torch.tanh(h)))


def messages(m: nn.Module, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """What parameters make of both ends, by row."""
    return torch.relu(m.norm(m.edge(torch.cat([h[row], h[col]], -1))))


def wide(index: Tensor, x: Tensor) -> Tensor:
    return index[:, None].expand_as(x)


CUSTOM: dict[str, Callable[..., Tensor]] = {
    "index_add": lambda m, h, row, col: torch.zeros_like(h).index_add(0, col, messages(m, h, row, col), alpha=0.5),
    "index_put": lambda m, h, row, col: h.index_put((col,), messages(m, h, row, col), accumulate=True),
    "largest": lambda m, h, row, col: scatter(messages(m, h, row, col), col, h.shape[0], "max"),
    "smallest": lambda m, h, row, col: scatter(messages(m, h, row, col), col, h.shape[0], "min"),
    "largest-and-own": lambda m, h, row, col: h.relu().scatter_reduce(
        0, wide(col, h[col]), messages(m, h, row, col), "amax"),
    "largest-without-own": lambda m, h, row, col: h.scatter_reduce(
        0, wide(col, h[col]), messages(m, h, row, col), "amax", include_self=False),
    "mean": lambda m, h, row, col: h.scatter_reduce(0, wide(col, h[col]), messages(m, h, row, col), "mean"),
    "mean-without-own": lambda m, h, row, col: h.scatter_reduce(
        0, wide(col, h[col]), messages(m, h, row, col), "mean", include_self=False),
    "sum-without-own": lambda m, h, row, col: h.scatter_reduce(
        0, wide(col, h[col]), messages(m, h, row, col), "sum", include_self=False),
    "heads-folded": lambda m, h, row, col: torch.zeros_like(h).index_add(
        0, col, torch.tanh(h[row].view(-1, 2, 2).flatten(0, 1) * 0.5).view(-1, 4)),
    "distances": lambda m, h, row, col: torch.zeros_like(h).index_add(
        0, col, h[row] * torch.exp(-(h[row] - h[col]).square().sum(-1, keepdim=True))),
}  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", CUSTOM)
def test_what_is_done_along_edges_and_loops(name: str, masked: bool) -> None:
    """Among others largest values with ties, whose derivative all of them share."""
    check(made(Custom, CUSTOM[name], masked), losses, batches(), quantities=usual())
