"""Determinants of matrices that are slices of samples: torch factorizes the transpose of one that lies in order, as a
slice of one sample does, and those of several do not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from support import oracle

X = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda h: h[:, :4], "later-rows": lambda h: h[:, 1:], "transposed": lambda h: h[:, :4].mT,
    "in-order": lambda h: h[:, :4].contiguous(), "a-part": lambda h: h.unflatten(1, (5, 1))[:, 1:, 0],
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "det": torch.det, "slogdet": lambda a: torch.linalg.slogdet(a).logabsdet, "method": lambda a: a.det(),
    "logdet": lambda a: torch.logdet(torch.cat([a @ a.mT + torch.eye(4), a], 1)[:, :4]),
    "under-vmap": lambda a: torch.vmap(torch.det)(a),
    "its-gradient": lambda a: torch.func.grad(lambda m: torch.slogdet(m)[1].sum())(a).square().sum((1, 2)),
    "solve": lambda a: torch.linalg.solve(a, a[:, 0]).sum(1),
}  # fmt: skip


class Sliced(nn.Module):
    def __init__(self, cut: str, function: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.cut, self.function = nn.Linear(3, 4).double(), SLICES[cut], FUNCTIONS[function]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.cut(self.layer(x)))


@pytest.mark.parametrize("cut", SLICES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_of_several_samples_and_of_one(function: str, cut: str) -> None:
    model = Sliced(cut, function)
    step = psg_fx.transform(model, torch.mean, quantities=psg_fx.Grads(), backend="eager")
    for size in (4, 1):
        losses, grads = oracle.loop_grads(model, torch.mean, X[:size])
        found = step(X[:size])
        torch.testing.assert_close((found.losses, found.grads), (losses, grads))


def test_compiled() -> None:
    model = Sliced("rows", "det")
    step = psg_fx.transform(model, torch.mean, quantities=psg_fx.Norms())
    for size in (4, 1):
        grads = oracle.loop_grads(model, torch.mean, X[:size])[1]
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
        torch.testing.assert_close(step(X[:size]).norms, norms)
