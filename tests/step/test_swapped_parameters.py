"""Parameters that are swapped for others in place, as conversions of modules may do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import psg_fx
from support import oracle
from support.small import mlp

X, Y = torch.randn(3, 4), torch.tensor([0, 1, 2])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("loss", [F.cross_entropy, None], ids=["loss", "no-loss"])
def test_parameters_can_be_swapped_between_calls(loss: Any, backend: str) -> None:
    net = mlp()
    step = psg_fx.transform(net, loss, backend=backend)
    targets = () if loss is None else (Y,)
    step(X, *targets)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    out = step(X.double(), *targets)
    losses, grads = oracle.loop_grads(net, F.cross_entropy, X.double(), Y)
    if loss is None:
        F.cross_entropy(out, Y, reduction="sum").backward()
        torch.testing.assert_close({n: p.grad_sample for n, p in net.named_parameters()}, grads)
    else:
        torch.testing.assert_close((out.losses, out.grads), (losses, grads))
