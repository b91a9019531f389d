"""Elements are counted by sizes in what is compiled: Dynamo of torch 2.11 does not know `sym_numel`."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule

from psg_fx.passes.compile.prepared import _count_by_sizes

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (), (2, 0)])
def test_elements_are_counted_by_sizes(shape: tuple[int, ...]) -> None:
    graph, value = Graph(), torch.randn(shape)
    tensor = graph.placeholder("x")
    tensor.meta["val"] = value
    count = graph.call_function(aten.sym_numel.default, (tensor,))
    graph.output(graph.call_function(aten.arange.default, (count,)))
    gm = GraphModule({}, graph)
    _count_by_sizes(gm)
    gm.recompile()
    assert aten.sym_numel.default not in {node.target for node in gm.graph.nodes}
    assert torch.equal(gm(value), torch.arange(value.numel()))
