"""Losses that take one element, where several are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psg_fx.passes.independence.batch import batch
from psg_fx.passes.unreduce.unreduce import unreduce
from support.graphs import called, captured


def share_of_ties(o: Tensor, _: Tensor) -> dict[str, Tensor]:
    """Losses that take one element, as torch writes their gradient where several are equal."""
    return {
        "max": o.max(), "min": o.min(), "median": o.median(), "nanmedian": o.nanmedian(), "amax": o.amax(),
        "aminmax": torch.sub(*o.aminmax()), "infinity norm": torch.linalg.vector_norm(o, float("inf")),
        "maximum": torch.maximum(o, o.detach() * 1).mean(), "max along": o.max(0)[0].amax(),
    }  # fmt: skip


@pytest.mark.parametrize("name", share_of_ties(torch.ones(2), torch.ones(2)))
def test_equal_elements_share_the_gradient_as_in_the_loop(name: str) -> None:
    if name == "aminmax" and torch.__version__ < "2.12":
        pytest.skip("torch has no derivative of it yet")
    x = torch.tensor([[2.0, 1, 2, 1], [3, 3, 3, 3], [0, 1, 1, 1]], dtype=torch.float64)[..., None].requires_grad_()

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return share_of_ties(o, y)[name]

    gm = unreduce(batch(captured(lambda x: 1 * x, loss, (x,), (x.detach()[:, 0],))))
    (found,) = torch.autograd.grad(called(gm, x, x.detach()[:, 0])[-1].sum(), x)
    wanted = [torch.autograd.grad(loss(1 * one[None], one), one)[0] for one in x.detach().requires_grad_().unbind()]
    torch.testing.assert_close(found, torch.stack(wanted))
