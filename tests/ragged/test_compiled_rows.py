"""Steps on rows under inductor: one compilation for all numbers of rows, edges and samples, and the same checks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import SamplesMixed
from support import graphs_of_nodes, packed
from support.expected import compare
from support.rows_of_samples import Batch, RowsTruth, check, run
from support.self_loops import GATConv

pytestmark = [pytest.mark.slow, pytest.mark.inductor]


def test_graphs() -> None:
    model = graphs_of_nodes.made(graphs_of_nodes.OneLayer)
    quantities = [psg_fx.Norms(), psg_fx.ClippedSum(0.5)]
    many = [graphs_of_nodes.graphs(*given) for given in (graphs_of_nodes.MANY[0], graphs_of_nodes.MANY[4])]
    step = check(model, graphs_of_nodes.losses, many, quantities=quantities, backend="inductor")
    assert sum(entry.name == "compile" for entry in step.captures[0].step.history.passes) == 1
    inputs = graphs_of_nodes.graphs([3, 2, 5], [4, 2, 7]).whole.inputs
    crossing = inputs[1].clone()
    crossing[0, 5] = 8
    with pytest.raises(SamplesMixed, match="row 5 of the rows of input_1"):
        step((inputs[0], crossing, *inputs[2:]), torch.zeros(3, dtype=torch.int64))


class OneLoopedLayer(nn.Module):
    """Attention once, over edges of which loops are dropped, and a loop for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = GATConv(4, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        h = torch.tanh(self.layer(x, edge_index))
        return self.head(h.new_zeros(count, 6).index_add(0, batch, h))  # type: ignore[no-any-return]


@pytest.mark.rest
def test_self_loops_that_a_layer_adds() -> None:
    many = [graphs_of_nodes.graphs(*given) for given in (graphs_of_nodes.MANY[0], graphs_of_nodes.MANY[4])]
    quantities = [psg_fx.Norms(), psg_fx.ClippedSum(0.5)]
    check(graphs_of_nodes.made(OneLoopedLayer), graphs_of_nodes.losses, many, quantities=quantities, backend="inductor")


@pytest.mark.rest
def test_documents() -> None:
    batches: list[Batch] = [packed.documents(*given, seed=k) for k, given in enumerate(packed.MANY[:2])]
    model = packed.made()
    truths = [RowsTruth(model, packed.losses, b) for b in batches]
    asked = [psg_fx.Norms(), psg_fx.ClippedSum(truths[0].bound)]
    step = psg_fx.transform(model, packed.losses, batch_dim=packed.BATCH_DIM, quantities=asked)
    for batch, truth in zip(batches, truths, strict=True):
        compare(run(step, batch, truth), truth, asked, 1e-10)
