"""Gradients that are no number: where an op's own backward does not read them, neither do those of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support.oracle import loop_grads

QUANTITIES = [psg_fx.Grads(), psg_fx.MeanGrad(), psg_fx.SecondMoment()]
IDS = torch.tensor([[1, 2, 0], [3, 0, 0], [2, 2, 4]])


class Roots(nn.Module):
    """Rows of a table, of which row 1 is zero: there a root has an infinite slope, and a norm none."""

    def __init__(self, rows: Callable[[Tensor, Tensor], Tensor], size: int, root: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rows, self.root = rows, root
        self.weight = nn.Parameter(torch.rand(size, 3, dtype=torch.float64) + 0.5)
        self.weight.data[1] = 0

    def forward(self, ids: Tensor) -> Tensor:
        return self.root(self.rows(ids, self.weight)).sum((1, 2))


ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": F.embedding,
    "padding": lambda ids, w: F.embedding(ids, w, padding_idx=1),
    "index": lambda ids, w: w[ids],
    "index_select": lambda ids, w: w.index_select(0, ids.flatten()).view(*ids.shape, 3),
}
ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "inf": lambda h: h.sqrt(),
    "nan": lambda h: torch.where(h == 0, 0.0, h / h.norm(dim=-1, keepdim=True)),
}


def check(model: nn.Module, given: Tensor) -> None:
    losses, grads = loop_grads(model, torch.sum, given)
    out: Any = psg_fx.transform(model, torch.sum, quantities=QUANTITIES, backend="eager")(given)
    assert any(g.isfinite().any() for g in grads.values())
    for name, g in grads.items():
        for found, expected in (
            (out.grads[name], g), (out.mean_grad[name], g.mean(0)), (out.second_moment[name], g.square().mean(0)),
        ):  # fmt: skip
            assert torch.equal(found.isfinite(), expected.isfinite())
            torch.testing.assert_close(found[expected.isfinite()], expected[expected.isfinite()])
    assert len(losses) == len(given)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("size", [5, 50])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_other_tokens(rows: str, size: int, root: str) -> None:
    torch.manual_seed(0)
    check(Roots(ROWS[rows], size, ROOTS[root]), IDS)


class Slopes(nn.Module):
    """PReLU's slopes read negative places alone; roots have no number where the output is 2."""

    def __init__(self, slopes: int) -> None:
        super().__init__()
        self.act = nn.PReLU(slopes, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.act(x) - 2).abs().sqrt().sum(1)


@pytest.mark.parametrize("slopes", [1, 3])
def test_places_without_a_slope(slopes: int) -> None:
    check(Slopes(slopes), torch.tensor([[2.0, 1.0, -1.0], [0.5, -2.0, -3.0]], dtype=torch.float64))
