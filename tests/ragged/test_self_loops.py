"""Layers of graphs that add self-loops by themselves: rows of edges and of nodes one behind the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import NotYetSupported, SamplesMixed
from support.graphs_of_nodes import BATCH_DIM, batches, graphs, losses, made, with_attributes
from support.rows_of_samples import check, usual
from support.selection import at_once, one_in, selected
from support.self_loops import GATConv, GCNConv, Layers, WithAttributes, scatter

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: Layers(GCNConv(4, 6), GCNConv(6, 6)),
    "gcn/all": lambda: Layers(GCNConv(4, 6, False), GCNConv(6, 6, False)),
    "gat": lambda: Layers(GATConv(4, 3), GATConv(6, 3)),
    "gat/two": lambda: Layers(GATConv(4, 3, two=True), GATConv(6, 3, two=True)),
    "gat/all": lambda: Layers(GATConv(4, 3, removes=False), GATConv(6, 3, two=True, removes=False)),
    "both": lambda: Layers(GATConv(4, 3), GCNConv(6, 6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", selected(LAYERS, {"both"}))
def test_layers(name: str) -> None:
    """With graphs that have self-loops already, some twice, and with graphs that have no edges or no nodes.

    An edge between graphs is seen at the call, by the row among the edges; the step serves the next batch.
    """
    step, given = check(made(LAYERS[name]), losses, batches(), quantities=usual()), graphs([3, 0, 5, 2], [4, 0, 7, 1])
    good = step(given.whole.inputs, given.whole.targets)
    x, edge_index, batch, count = given.whole.inputs
    for end, column, value in ((0, 2, 9), (1, 0, 3), (0, 11, 0)):
        crossing = edge_index.clone()
        crossing[end, column] = value
        with pytest.raises(SamplesMixed, match=f"row {column} of the rows of input_1 is joined"):
            step((x, crossing, batch, count), given.whole.targets)
    assert torch.equal(step(given.whole.inputs, given.whole.targets).norms, good.norms)
    assert len(step.captures) == 1


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gcn", "gat/two"])
def test_every_quantity(name: str) -> None:
    check(made(LAYERS[name]), losses, batches())


ATTRIBUTES: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "gcn/all": (0, lambda: WithAttributes(GCNConv(4, 6, False), GCNConv(6, 6, False))),
    "gat/mean": (2, lambda: WithAttributes(GATConv(4, 3, edges=2), GATConv(6, 3, edges=2))),
    "gat/number": (2, lambda: WithAttributes(GATConv(4, 3, edges=2, fill=0.5), GATConv(6, 3, edges=2, fill=0.1))),
    "gat/max": (2, lambda: WithAttributes(GATConv(4, 3, edges=2, fill="max"), GATConv(6, 3, edges=2, two=True))),
    "gat/one": (2, lambda: WithAttributes(GATConv(4, 3, edges=2, two=True, fill="max"))),
}


@pytest.mark.parametrize("name", selected(ATTRIBUTES, {"gat/one"}))
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


def wide(index: Tensor, x: Tensor) -> Tensor:
    return index[:, None].expand_as(x)


CUSTOM: dict[str, Callable[..., Tensor]] = {
    "index_add": lambda y, h, row, col: torch.zeros_like(h).index_add(0, col, y, alpha=0.5),
    "index_put": lambda y, h, row, col: h.index_put((col,), y, accumulate=True),
    "largest": lambda y, h, row, col: scatter(y, col, h.shape[0], "max"),
    "smallest": lambda y, h, row, col: scatter(y, col, h.shape[0], "min"),
    "largest-and-own": lambda y, h, row, col: h.relu().scatter_reduce(0, wide(col, h[col]), y, "amax"),
    "largest-without-own": lambda y, h, row, col: h.scatter_reduce(
        0, wide(col, h[col]), y, "amax", include_self=False),
    "largest-of-none": lambda y, h, row, col: torch.exp(scatter(
        y.masked_fill(h[row] < 0.2, -torch.inf), col, h.shape[0], "max")),
    "mean": lambda y, h, row, col: h.scatter_reduce(0, wide(col, h[col]), y, "mean"),
    "mean-without-own": lambda y, h, row, col: h.scatter_reduce(0, wide(col, h[col]), y, "mean", include_self=False),
    "sum-without-own": lambda y, h, row, col: h.scatter_reduce(0, wide(col, h[col]), y, "sum", include_self=False),
    "heads-folded": lambda y, h, row, col: torch.zeros_like(h).index_add(
        0, col, torch.tanh(h[row].view(-1, 2, 2).flatten(0, 1) * 0.5).view(-1, 4)),
    "distances": lambda y, h, row, col: torch.zeros_like(h).index_add(
        0, col, h[row] * torch.exp(-(h[row] - h[col]).square().sum(-1, keepdim=True))),
}  # fmt: skip
"""What is done with messages `y` from rows to others."""


def together(*names: str) -> Callable[..., Tensor]:
    """Several of them in one layer, of what parameters make of both ends, by row."""

    def layer(m: nn.Module, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        y = torch.relu(m.norm(m.edge(torch.cat([h[row], h[col]], -1))))
        return torch.stack([torch.tanh(CUSTOM[name](y, h, row, col)) * (k + 1) for k, name in enumerate(names)]).sum(0)

    return layer


ALL_OR_MASKED = [pytest.param(False, id="all", marks=pytest.mark.rest), pytest.param(True, id="masked")]


# Those at once are one of each way to write; what reads the same derivative of it by another name is in the rest.
WAYS = [("index_add", "largest-and-own", "largest-of-none", "mean-without-own"), ("largest",)]


@pytest.mark.slow
@pytest.mark.parametrize("masked", ALL_OR_MASKED)
@pytest.mark.parametrize("names", at_once(WAYS, CUSTOM))
def test_what_is_done_along_edges_and_loops(names: tuple[str, ...], masked: bool) -> None:
    """Among others largest values with ties, whose derivative all of them share."""
    check(made(Custom, together(*names), masked), losses, batches(), quantities=usual())


class Edges(nn.Module):
    """The sum of layers on edges, some of which a mask picks."""

    def __init__(self, *layers: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = layers
        self.lin, self.edge, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        h = self.lin(x)
        h = torch.stack([layer(self, h, edge_index) * (k + 1) for k, layer in enumerate(self.layers)]).sum(0)
        return self.head(h.new_zeros(count, 4).index_add(0, batch, torch.tanh(h)))


def unmasked(edge_index: Tensor) -> Tensor:
    return edge_index[:, edge_index[0] != edge_index[1]]


def by_distance(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
    """What removed loops would divide by: zero."""
    row, col = unmasked(edge_index)
    d = h[row] - h[col]
    return torch.zeros_like(h).index_add(0, col, d / d.square().sum(-1, keepdim=True).sqrt())


def of_differences(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
    """A parameter's product below a root, in which removed loops have a derivative that is not finite."""
    row, col = unmasked(edge_index)
    y = m.edge((h[row] - h[col]).square()).square().sum(-1, keepdim=True).sqrt()
    return torch.zeros_like(h).index_add(0, col, y.log() * h[row])


def both_ways(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
    """Each edge in both directions, and a loop: three parts, two of the same axis."""
    loops = torch.arange(h.shape[0]).expand(2, -1)
    row, col = torch.cat([torch.cat([edge_index, edge_index.flip(0)], 1), loops], 1)
    return torch.zeros_like(h).index_add(0, col, torch.tanh(m.edge(h[row] * h[col])))


def loops_first(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
    loops = torch.arange(h.shape[0]).expand(2, -1)
    row, col = torch.cat([loops, unmasked(edge_index)], 1)
    degree = torch.zeros(h.shape[0], dtype=h.dtype).index_add(0, col, torch.ones(col.shape[0], dtype=h.dtype))
    return torch.zeros_like(h).index_add(0, col, torch.tanh(m.edge(h[row]))) / degree[:, None]


def picked_twice(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
    """Loops and other edges each by a mask of their own, and all edges beside them."""
    same = edge_index[0] == edge_index[1]
    row, col = edge_index[:, same]
    y = torch.zeros_like(h).index_add(0, col, torch.sin(m.edge(h[row])))
    row, col = edge_index[:, ~same]
    y = y.index_add(0, col, torch.cos(m.edge(h[row])))
    return y.index_add(0, edge_index[1], h[edge_index[0]])


def filled(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
    """Of edges that are picked and loops, each with a number in the code."""
    loops, kept = torch.arange(h.shape[0]).expand(2, -1), unmasked(edge_index)
    row, col = torch.cat([kept, loops], 1)
    weight = torch.cat([torch.full((kept.shape[1], 1), 0.3, dtype=h.dtype), h.new_ones(h.shape[0], 1)])
    return torch.zeros_like(h).index_add(0, col, weight * torch.tanh(m.edge(h[row])))


def without_edges(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
    """No edge is picked."""
    row, col = edge_index[:, edge_index[0] < 0]
    return h.index_add(0, col, m.edge(h[row]).log())


OF_EDGES = {
    layer.__name__: layer
    for layer in (by_distance, of_differences, both_ways, loops_first, picked_twice, filled, without_edges)
}
DEMANDING = ("by_distance", "of_differences", "picked_twice", "filled")


@pytest.mark.slow
@pytest.mark.parametrize("names", at_once([DEMANDING], OF_EDGES))
def test_edges_that_a_mask_picks(names: tuple[str, ...]) -> None:
    check(made(Edges, *(OF_EDGES[name] for name in names)), losses, batches(), quantities=usual())


def step_of(model: nn.Module) -> psg_fx.PerSampleModule:
    return psg_fx.transform(model, losses, batch_dim=BATCH_DIM, quantities=psg_fx.Norms(), backend="eager")


def added(m: nn.Module, h: Tensor, col: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, col, y)


MIXING: dict[str, Callable[..., Tensor]] = {
    "mean": lambda m, h, row, col: added(m, h, col, h[row] - h[row].mean(0)),
    "sum": lambda m, h, row, col: added(m, h, col, h[row]) + h[row].sum(0),
    "softmax": lambda m, h, row, col: added(m, h, col, h[row].softmax(0)),
    "cumsum": lambda m, h, row, col: added(m, h, col, h[row].cumsum(0)),
    "flip": lambda m, h, row, col: added(m, h, col, h[row].flip(0)),
    "roll": lambda m, h, row, col: added(m, h, col.roll(1), h[row]),
    "place": lambda m, h, row, col: added(m, h, col, h[row] * torch.arange(row.shape[0])[:, None]),
    "count": lambda m, h, row, col: added(m, h, col, h[row] / row.shape[0]),
    "count-filled": lambda m, h, row, col: added(m, h, col, h[row] * h.new_full((row.shape[0], 1), row.shape[0])),
    "first": lambda m, h, row, col: added(m, h, col, h[row] - h[row][0]),
    "cut-elsewhere": lambda m, h, row, col: added(m, h, col[1:], h[row[1:]]),
    "first-as-many-as-nodes": lambda m, h, row, col: h + h[row][: h.shape[0]],
    "other-order": lambda m, h, row, col: added(m, h, col, h[row] + torch.cat([h, h[row[: -h.shape[0]]]])),
    "products": lambda m, h, row, col: added(m, h, col, h[row] @ (h[row].T @ h[row])),
    "rows-of-it": lambda m, h, row, col: added(m, h, col, h[row][col]),
    "sorted": lambda m, h, row, col: added(m, h, col, h[row].sort(0).values),
    "pairs": lambda m, h, row, col: added(m, h, col, (h[row] @ h.T).sum(1, keepdim=True) * h[row]),
    "largest-of-all": lambda m, h, row, col: added(m, h, col, h[row] - h[row].amax(0)),
    "drawn-order": lambda m, h, row, col: added(m, h, col, h[row][torch.randperm(row.shape[0])]),
    "batch-norm": lambda m, h, row, col: added(m, h, col, (h[row] - h[row].mean(0)) / h[row].std(0)),
}  # fmt: skip


@pytest.mark.parametrize("masked", ALL_OR_MASKED)
@pytest.mark.parametrize("name", one_in(4, MIXING))  # test_mixing_of_rows.py has the same ops without loops
def test_what_mixes_them_is_refused(name: str, masked: bool) -> None:
    given = graphs([3, 0, 5, 2], [4, 0, 7, 1])
    model = made(Custom, MIXING[name], masked)
    with pytest.raises((SamplesMixed, NotYetSupported), match=r"self_loops\.py"):
        step_of(model)(given.whole.inputs, given.whole.targets)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "draws": (lambda: Layers(GATConv(4, 3, dropout=0.5)), "it draws at random"),
    "written": (lambda: Custom(lambda m, h, row, col: h * (h > 9).index_put((col,), h[row] > 0)),
                "aten.index_put .* all rows of %cat"),
    "products": (lambda: Custom(lambda m, h, row, col: h.scatter_reduce(0, wide(col, h[row]), h[row], "prod")),
                 "aten.scatter_reduce .* all rows of %cat"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_said_of_others(name: str) -> None:
    given, (model, words) = graphs([3, 0, 5, 2], [4, 0, 7, 1]), REFUSED[name]
    with pytest.raises(NotYetSupported, match=f"(?s){words}.*AddRemainingSelfLoops"):
        step_of(made(model).train())(given.whole.inputs, given.whole.targets)


@pytest.mark.rest  # torch.export leaves it out before psg_fx sees the graph
def test_dropout_at_rest() -> None:
    """In evaluation mode it does nothing."""
    model = made(lambda: Layers(GATConv(4, 3, dropout=0.5), GATConv(6, 3, dropout=0.5))).eval()
    check(model, losses, batches()[:2], quantities=[psg_fx.Norms()])


def test_rows_of_other_graphs_one_behind_the_other() -> None:
    """A pointer into the nodes that is not their own number."""

    def shifted(m: nn.Module, h: Tensor, edge_index: Tensor) -> Tensor:
        loops = torch.stack([torch.arange(h.shape[0]).roll(1), torch.arange(h.shape[0])])
        row, col = torch.cat([edge_index, loops], 1)
        return torch.zeros_like(h).index_add(0, col, h[row])

    given = graphs([3, 5, 2], [4, 7, 1])
    with pytest.raises(NotYetSupported, match=r"cannot be shown(.|\n)*of that sample alone: aten.roll"):
        step_of(made(Edges, shifted))(given.whole.inputs, given.whole.targets)
