"""Weights that hooks of torch compute before a layer runs, and leave with it: a step leaves those of its call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import psg_fx
from support import oracle

X = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1])
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.4),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_last_call(way: str, trains: bool) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(WAYS[way](nn.Linear(5, 3)), nn.Tanh()).double().train(trains)
        with torch.no_grad():
            model(X)
            for parameter in model.parameters():
                parameter.mul_(2)
        return model

    model, plain = made(), made()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for _ in range(2):
        losses, grads = oracle.loop_grads(plain, F.cross_entropy, X, Y)
        found = step(X, Y)
        torch.testing.assert_close((found.losses, found.grads), (losses, grads))
        plain(X)
        torch.testing.assert_close(model[0].weight, plain[0].weight.detach())
