"""A sum of what is stacked for it as additions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.passes.compile.sums import add_what_is_stacked

aten = torch.ops.aten


def traced(function: Callable[..., object], dtype: torch.dtype) -> tuple[GraphModule, list[Tensor]]:
    torch.manual_seed(0)
    inputs = [torch.randn(5, 3).to(dtype) for _ in range(3)]
    return make_fx(function, tracing_mode="fake")(*inputs), inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_same_to_the_last_bit(dtype: torch.dtype) -> None:
    gm, inputs = traced(lambda x, y, z: torch.stack([x, y.abs(), x, z]).sum(0) * 2, dtype)
    want = gm(*inputs)
    found = add_what_is_stacked(gm)
    found.recompile()
    assert not {aten.stack.default, aten.sum.dim_IntList} & {node.target for node in found.graph.nodes}
    assert torch.equal(found(*inputs), want)


LEFT = {
    "along another dim": lambda x, y, z: torch.stack([x, y, z]).sum(1),
    "stacked along another dim": lambda x, y, z: torch.stack([x, y, z], 1).sum(0),
    "a dim is kept": lambda x, y, z: torch.stack([x, y, z]).sum(0, keepdim=True),
    "in another dtype": lambda x, y, z: torch.stack([x, y, z]).sum(0, dtype=torch.float64),
    "everything": lambda x, y, z: torch.stack([x, y, z]).sum(),
    "read twice": lambda x, y, z: (stack := torch.stack([x, y, z])).sum(0) + stack[0],
    "of something else": lambda x, y, z: torch.cat([x, y, z]).sum(0),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    gm, _ = traced(LEFT[name], torch.float32)
    before = [node.target for node in gm.graph.nodes]
    assert [node.target for node in add_what_is_stacked(gm).graph.nodes] == before


def test_half_precision_is_accumulated_in_single() -> None:
    gm, _ = traced(lambda x, y, z: torch.stack([x, y, z]).sum(0), torch.bfloat16)
    assert aten.stack.default in [node.target for node in add_what_is_stacked(gm).graph.nodes]
