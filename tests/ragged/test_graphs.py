"""Graphs as samples: networks that pass messages along edges, each with every quantity, against single graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import Rows
from psg_fx.planner.plan import PLAN
from psg_fx.step import rows as of_call
from support.graphs_of_nodes import GAT, GCN, GIN, CountingGIN, EdgeMLP, GraphSAGE, batches, graphs, losses, made
from support.rows_of_samples import Batch, RowsTruth, check, usual
from support.selection import one_in, selected


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stay where they are, as if to bring them in order took too much memory."""
    monkeypatch.setattr(of_call, "fits_in_order", lambda places, rows: not places)


KINDS = (GIN, GCN, GraphSAGE, GAT, EdgeMLP)


@pytest.mark.parametrize("kind", selected(KINDS, {"EdgeMLP"}))
def test_every_quantity(kind: type[nn.Module]) -> None:
    check(made(kind), losses, batches())


@pytest.mark.parametrize("kind", selected(KINDS[:-1], {"GraphSAGE"}))  # GIN and GCN: below; GAT: test_self_loops.py
def test_the_usual_quantities(kind: type[nn.Module]) -> None:
    check(made(kind), losses, batches(), quantities=usual())


@pytest.mark.usefixtures("scattered")
@pytest.mark.parametrize("kind", [GCN, pytest.param(EdgeMLP, marks=pytest.mark.rest)])
def test_every_quantity_of_rows_that_stay(kind: type[nn.Module]) -> None:
    step = check(made(kind), losses, batches())
    assert "onehot(ids)" in step.explain()


def test_mean_of_neighbours_and_loss_that_is_a_mean() -> None:
    """A loss that is reduced over the batch is taken apart as ever."""
    check(made(GraphSAGE, "mean"), F.cross_entropy, batches(), quantities=usual())


def test_edges_with_ids_of_their_own() -> None:
    """Rows of edges are brought in order, too, once their ids are known outside of the graph."""
    ends = Rows(lambda x, edge_index, batch, count: batch[edge_index[1]], dim=1)
    dims = ((Rows("batch"), ends, Rows("batch"), 0), 0)
    check(made(EdgeMLP), losses, [Batch(b.whole, b.alone, dims) for b in batches()], quantities=usual())


@pytest.mark.parametrize("dtype", one_in(2, [torch.int32, torch.int64]))
def test_ids_by_position_and_narrow_ones(dtype: torch.dtype) -> None:
    given = graphs([3, 0, 5, 2], [4, 0, 7, 1], "shuffled")
    x, edge_index, batch, count = given.whole.inputs
    model = made(GIN)
    truth = RowsTruth(model, losses, given)
    step = psg_fx.transform(
        model, losses, batch_dim=((Rows(2), Rows(None, -1), Rows(2), 0), 0), quantities=psg_fx.Norms(),
        backend="eager",
    )  # fmt: skip
    out = step((x, edge_index.to(dtype), batch.to(dtype), count), given.whole.targets)
    torch.testing.assert_close(out.norms, truth.norms)


def test_per_parameter_and_automatic() -> None:
    """Other quantities of the same contractions."""
    asked = [
        psg_fx.ClippedSum(0.3, per="parameter", style="automatic", weighted=True),
        psg_fx.Norms(per="parameter", squared=True), psg_fx.SecondMoment(centered=True),
    ]  # fmt: skip
    check(made(GIN), losses, batches()[:2], quantities=asked)


class NodeLoss(nn.Module):
    """A value for each node; the loss is the mean over those of a graph, found by the targets' own ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]


def test_rows_among_the_targets_and_num_samples() -> None:
    given = graphs([3, 1, 5, 2], [0, 0, 0, 0], "shuffled")
    x, _, batch, _ = given.whole.inputs

    def loss(out: Tensor, values: Tensor, ids: Tensor, count: int) -> Tensor:
        nodes = out.new_zeros(count).index_add(0, ids, torch.ones_like(out))
        return out.new_zeros(count).index_add(0, ids, (out - values).square()) / nodes

    rows = Rows("ids")
    model, values = made(NodeLoss), torch.randn(11, dtype=torch.float64)
    step = psg_fx.transform(
        model, loss, batch_dim=(rows, {"values": rows, "ids": rows, "count": 0}), quantities=psg_fx.Grads(),
        backend="eager",
    )  # fmt: skip
    out = step(x, {"values": values, "ids": batch, "count": 4}, num_samples=4)
    for s in range(4):
        own = batch == s
        alone = loss(model(x[own]), values[own], torch.zeros(int(own.sum()), dtype=torch.int64), 1)
        torch.testing.assert_close(out.losses[s], alone[0])
        grads = torch.autograd.grad(alone.sum(), list(model.parameters()))
        torch.testing.assert_close([out.grads["layer.weight"][s], out.grads["layer.bias"][s]], list(grads))


def test_buffers_are_not_written_where_samples_mix() -> None:
    """Nor is anything returned: the batch is refused before."""
    model, given = made(CountingGIN), graphs([3, 4], [3, 4])
    step = psg_fx.transform(model, losses, batch_dim=given.batch_dim, quantities=psg_fx.Norms(), backend="eager")
    step(given.whole.inputs, given.whole.targets)
    x, edge_index, batch, count = given.whole.inputs
    crossing = edge_index.clone()
    crossing[0, 0] = 5
    with pytest.raises(psg_fx.SamplesMixed):
        step((x, crossing, batch, count), given.whole.targets)
    assert model.calls == 1


class Wide(nn.Module):
    """A table, whose rows of one graph are compared with each other, and wide layers, on nodes without edges."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(4000, 3), nn.Linear(4, 96), nn.Linear(99, 3)
        self.down = nn.Linear(96, 96)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        h = self.down(torch.tanh(self.up(x)))
        h = torch.cat([h, self.table((100 * x[:, 0]).long() % 4000)], 1)
        return self.head(h.new_zeros(count, 99).index_add(0, batch, h))


def test_each_parameter_has_the_cheaper_layout() -> None:
    """Rows of the table stay where they lie; those of narrow layers are padded and multiplied at once."""
    uneven = [graphs([sizes, *[2] * 20], [0] * 21, order) for sizes, order in ((9, "sorted"), (8, "shuffled"))]
    step = check(made(Wide), losses, uneven, quantities=usual())
    plan = PLAN.of(step.graphs["planned"])
    leaves = {p.gradient.name: p.gradient.terms[0].network.leaves for p in plan.parameters}
    read = {name: {source.name for leaf in of for source in leaf.sources} for name, of in leaves.items()}
    assert "members.0" in read["down.weight"]
    assert "ids.0" in read["table.weight"]
    assert "members.0" not in read["table.weight"]
