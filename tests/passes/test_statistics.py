"""Normalisations whose statistics are found once: fewer reductions, the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum
from support import oracle

aten = torch.ops.aten
NORMS = (aten.native_group_norm.default, aten.native_layer_norm.default, aten._fused_rms_norm.default)


class Twice(nn.Module):
    """One normalisation without weights of its own, and one with them, of the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + F.layer_norm(x, (6,))


MODELS = {
    "group norm": nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.Flatten(), nn.Linear(54, 4)),
    "group norm, one number each": nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.GroupNorm(2, 6), nn.Linear(6, 4)),
    "layer norm": nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.LayerNorm(6), nn.Linear(6, 4)),
    "layer norm over two dims": nn.Sequential(nn.LayerNorm([5, 5]), nn.Flatten(), nn.Linear(50, 4)),
    "rms norm": nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.RMSNorm(6), nn.Linear(6, 4)),
    "twice": nn.Sequential(nn.Flatten(), nn.Linear(50, 6), Twice(), nn.Linear(6, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_found_once(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = MODELS[name].double(), torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.randint(4, (4,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.1), backend="eager", dynamic=True)
    for batch in (4, 3, 1):
        out = step(x[:batch], y[:batch])
        _, grads = oracle.loop_grads(model, F.cross_entropy, x[:batch], y[:batch])
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-12
    graph = step.graphs["tidied"].graph
    assert sum(node.target in NORMS for node in graph.nodes) <= 1  # none where torch writes it with other ops


def test_statistics_in_half_precision_are_not_taken() -> None:
    """A CPU rounds them; the normalised values are those of the op."""
    model = MODELS["layer norm"].bfloat16()
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.1), backend="eager")
    step(torch.randn(4, 2, 5, 5, dtype=torch.bfloat16), torch.randint(4, (4,)))
    nodes = [n for n in step.graphs["tidied"].graph.nodes if n.target is aten.native_layer_norm.default]
    kept = {value.dtype for value in nodes[0].meta["val"][1:]}
    assert len(nodes) == (2 if kept == {torch.bfloat16} else 1)
    model.float()
