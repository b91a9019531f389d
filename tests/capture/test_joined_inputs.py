"""Two inputs that are joined, run through one network and cut apart again, in all the ways that code does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from support import oracle

WAYS: dict[str, Callable[[Tensor, int], Sequence[Tensor]]] = {
    "split by sizes": lambda z, b: torch.split(z, [b, b]),
    "split_with_sizes": lambda z, b: z.split_with_sizes([b, b]),  # type: ignore[no-untyped-call]
    "unflatten": lambda z, b: z.unflatten(0, (2, b)),  # type: ignore[no-untyped-call]
    "view": lambda z, b: z.view(2, b, -1),
    "slices": lambda z, b: (z[:b], z[b:]),
    "narrow": lambda z, b: (z.narrow(0, 0, b), z.narrow(0, b, b)),
}


class Siamese(nn.Module):
    """The distance of two inputs; `first`: whose batch size the code takes."""

    def __init__(self, cut: Callable[[Tensor, int], Sequence[Tensor]], first: bool) -> None:
        super().__init__()
        self.layer, self.cut, self.first = nn.Linear(4, 3), cut, first

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one, two = self.cut(self.layer(torch.cat([a, b])), (a if self.first else b).shape[0])
        return (one.tanh() - two).square().mean()


@pytest.mark.parametrize("first", [True, False], ids=["of the first", "of the second"])
@pytest.mark.parametrize("way", WAYS)
def test_cut_apart(way: str, first: bool) -> None:
    torch.manual_seed(0)
    model, a, b = Siamese(WAYS[way], first).double(), *torch.randn(2, 5, 4, dtype=torch.float64)
    step = psg_fx.transform(model, lambda loss: loss, backend="eager", dynamic=True)
    for size in (5, 3):
        out = step((a[:size], b[:size]))
        _, grads = oracle.loop_grads(model, lambda loss: loss, (a[:size], b[:size]))
        assert oracle.worst_error(out.grads, grads) < 1e-12
    assert len(step.captures) == 1
