"""What calls of a subgraph return, laid side by side by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.ops.joined import joined, stacked
from psg_fx.passes.compile.calls import written_once
from psg_fx.passes.compile.joins import MANY, join_by_torch

LAYERS = MANY // 2


def layers(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Of each layer two results."""
    found = []
    for weight in weights:
        x = torch.tanh(x @ weight + 1).sin()
        y = (x * 2).exp() + x.square().mean(1, keepdim=True)
        found += [x, y]
    return found


def traced(join: Any, count: int = LAYERS, once: bool = True) -> tuple[GraphModule, list[Tensor]]:
    """once: layers are calls."""
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4), *(torch.randn(4, 4) for _ in range(count))]
    gm = make_fx(lambda *values: join(layers(*values)), tracing_mode="fake")(*inputs)
    return written_once(gm, fewest=4) if once else gm, inputs


JOINS = {
    "cat": (lambda parts: torch.cat(parts, 1), joined),
    "cat, its default": (torch.cat, joined),
    "stack": (lambda parts: torch.stack(parts, -1), stacked),
    "views": (lambda parts: torch.cat([part.flatten() for part in parts]), joined),
    "others among them": (lambda parts: torch.cat([*parts, parts[0].cos()]), joined),
}


@pytest.mark.parametrize("name", JOINS)
def test_many_parts(name: str) -> None:
    join, op = JOINS[name]
    gm, inputs = traced(join)
    want = gm(*inputs)
    found = join_by_torch(gm)
    found.recompile()
    assert [node.target for node in found.graph.nodes].count(op) == 1
    assert torch.equal(found(*inputs), want)


def test_few_parts_and_parts_of_kernels_are_left() -> None:
    gm, _ = traced(torch.cat, count=LAYERS - 1)
    assert joined not in [node.target for node in join_by_torch(gm).graph.nodes]
    gm, _ = traced(torch.cat, once=False)
    assert joined not in [node.target for node in join_by_torch(gm).graph.nodes]


@pytest.mark.inductor
def test_compiled() -> None:
    gm, inputs = traced(lambda parts: torch.cat(parts, 1).square().sum(1))
    want = gm(*inputs)
    found = join_by_torch(gm)
    found.recompile()
    torch.testing.assert_close(torch.compile(found)(*inputs), want)
