"""The layers of PyTorch Geometric on batches of graphs: exact against the loop over graphs, or refused by name.

It is not in the pinned environment: `pip install -e .[graphs]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import NotYetSupported
from support.graphs_of_nodes import BATCH_DIM, graphs, losses, with_attributes
from support.rows_of_samples import Batch, Part, check

geometric = pytest.importorskip("torch_geometric.nn")
utils = pytest.importorskip("torch_geometric.utils")

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": partial(geometric.GCNConv, 4, 6, add_self_loops=False),
    "gcn/no-norm": partial(geometric.GCNConv, 4, 6, normalize=False),
    "sage/mean": partial(geometric.SAGEConv, 4, 6),
    "sage/max": partial(geometric.SAGEConv, 4, 6, aggr="max"),
    "gin": lambda: geometric.GINConv(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)), train_eps=True),
    "gat": partial(geometric.GATConv, 4, 3, heads=2, add_self_loops=False),
    "gat/two": partial(geometric.GATv2Conv, 4, 3, heads=2, add_self_loops=False),
    "graph": partial(geometric.GraphConv, 4, 6),
    "transformer": partial(geometric.TransformerConv, 4, 3, heads=2),
}
POOLS = {name: getattr(geometric, f"global_{name}_pool") for name in ("add", "mean", "max")}


class Network(nn.Module):
    def __init__(self, layer: nn.Module, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.head, self.pool = layer, nn.LayerNorm(6), nn.Linear(6, 3), pool

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        return self.head(self.pool(self.norm(self.layer(x, edge_index)).tanh(), batch, count))


def made(layer: Callable[[], nn.Module], pool: str = "add") -> nn.Module:
    torch.manual_seed(0)
    return Network(layer(), POOLS[pool]).double()


BATCHES = [graphs([3, 5, 2], [4, 7, 1], "shuffled"), graphs([2, 4], [3, 9], "sorted", 1)]


@pytest.mark.parametrize(("layer", "pool"), [*((name, "add") for name in LAYERS), ("gin", "mean"), ("sage/max", "max")])
def test_exact(layer: str, pool: str) -> None:
    check(made(LAYERS[layer], pool), losses, BATCHES, quantities=[psg_fx.Grads(), psg_fx.ClippedSum(0.5)])


LOOPED: dict[str, Callable[..., nn.Module]] = {
    "gcn": partial(geometric.GCNConv, 4, 6),
    "gat": partial(geometric.GATConv, 4, 3, heads=2),
    "gat/two": partial(geometric.GATv2Conv, 4, 3, heads=2),
}


@pytest.mark.parametrize("name", LOOPED)
def test_self_loops_that_a_layer_adds(name: str) -> None:
    """It drops those that there are by a mask, and joins the edges with one for each node."""
    check(made(LOOPED[name]), losses, BATCHES, quantities=[psg_fx.Grads(), psg_fx.ClippedSum(0.5)])


class Weighted(nn.Module):
    """Two layers that keep the weights of loops, of weights that a parameter has part in."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.head = nn.Linear(1, 1), nn.Linear(6, 3)
        self.first, self.second = geometric.GCNConv(4, 5), geometric.GCNConv(5, 6, improved=True)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, batch: Tensor, count: int) -> Tensor:
        weight = torch.sigmoid(self.weigh(edge_weight[:, None]))[:, 0]
        h = self.second(torch.tanh(self.first(x, edge_index, weight)), edge_index, weight)
        return self.head(geometric.global_mean_pool(torch.tanh(h), batch, count))


def test_weights_of_edges() -> None:
    given = [with_attributes(b, 0) for b in BATCHES]
    assert any((b.whole.inputs[1][0] == b.whole.inputs[1][1]).any() for b in given)
    torch.manual_seed(0)
    check(Weighted().double(), losses, given, quantities=[psg_fx.Grads(), psg_fx.ClippedSum(0.5)])


def test_dropout_of_attention_with_loops_is_refused() -> None:
    step = psg_fx.transform(made(partial(LOOPED["gat"], dropout=0.5)), losses, batch_dim=BATCH_DIM, backend="eager")
    with pytest.raises(NotYetSupported, match="it draws at random"):
        step(BATCHES[0].whole.inputs, *BATCHES[0].whole.targets)


def with_loops(part: Part) -> Part:
    x, edge_index, *rest = part.inputs
    return Part((x, utils.add_remaining_self_loops(edge_index, num_nodes=len(x))[0], *rest), part.targets)


@pytest.mark.parametrize("name", LOOPED)
def test_self_loops_among_the_data(name: str) -> None:
    """The way out: the same numbers as those of a layer that adds them."""
    own, batch = made(LOOPED[name]), BATCHES[0]
    model = made(partial(LOOPED[name], add_self_loops=False))
    looped = Batch(with_loops(batch.whole), tuple(map(with_loops, batch.alone)), batch.batch_dim)
    torch.testing.assert_close(own(*batch.whole.inputs), model(*looped.whole.inputs))
    asked: list[Any] = [psg_fx.Grads(), psg_fx.Norms()]
    check(model, losses, [looped], quantities=asked)
