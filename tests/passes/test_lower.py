"""The order in which a plan is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.graph import facts


def test_sums_of_the_last_layers_come_first() -> None:
    """So that what is needed beside a large sum is free again before there are many results."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.ClippedSum(1.0), backend="eager")
    step(torch.randn(7, 6), torch.randint(3, (7,)))
    graph = step.graphs["lowered"]
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    answers = {spec.name: node for spec, node in facts.returned(graph) if spec.field == "clipped_sum"}
    places = [order[answers[f"{layer}.weight"]] for layer in (4, 2, 0)]
    assert places == sorted(places)


class TwoNamesAlike(nn.Module):
    """`block.fc_1.weight` and `block_fc.1.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.block_fc = nn.ModuleDict({"fc_1": nn.Linear(4, 4)}), nn.ModuleDict({"1": nn.Linear(4, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block_fc["1"](self.block["fc_1"](x).tanh())


@pytest.mark.parametrize("asked", [psg_fx.Dots(), psg_fx.Projection(2)], ids=repr)
def test_names_of_parameters_that_differ_in_a_point_alone(asked: psg_fx.Quantity) -> None:
    model = TwoNamesAlike()
    step = psg_fx.transform(model, F.cross_entropy, quantities=asked, backend="eager")
    directions = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    report = step.validate(
        torch.randn(5, 4), torch.randint(3, (5,)), **({"directions": directions} if asked.reads else {})
    )
    assert report.ok, report
