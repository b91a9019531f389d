"""Rows that a mask picks, in code that reads the batch size as a plain number, as `torch.zeros(len(x))` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from support import oracle

Way = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.each, self.way = nn.Linear(6, 6).double(), nn.Linear(1, 1).double(), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x) + torch.zeros(len(x), dtype=x.dtype)[:, None]


def rows(m: Any, x: Tensor) -> Tensor:
    h, out, picked = m.layer(x), torch.zeros(len(x), 6, dtype=x.dtype), x.sum(1) > 0
    out[picked] = m.layer(h[picked]).tanh()
    return out


def numbered(m: Any, x: Tensor) -> Tensor:
    h, out, places = m.layer(x), torch.zeros(len(x), 6, dtype=x.dtype), torch.nonzero(x[:, 0] > 0).squeeze(1)
    out[places] = m.layer(h[places])
    return out


def experts(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 6, dtype=x.dtype)
    weights, ids = m.layer(x).softmax(1).topk(2)
    for e in range(3):
        token, choice = torch.where(ids % 3 == e)
        out.index_add_(0, token, m.layer((e + 1) * x[token]) * weights[token, choice, None])
    return out


def spline(m: Any, x: Tensor) -> Tensor:
    """As flows by splines do: inside by a function, outside as it is."""
    h = m.layer(x)
    inside, out = h.abs() <= 1, torch.zeros_like(h)
    out[~inside] = h[~inside]
    out[inside] = m.each(h[inside][:, None])[:, 0].exp()
    return out


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1).mean()


def square_of_some(outputs: Tensor, targets: Tensor) -> Tensor:
    picked = targets > 0
    return (outputs[picked] - targets[picked]).square().sum() / len(targets)


CASES: dict[str, tuple[Way, Callable[[Tensor, Tensor], Tensor]]] = {
    "rows": (rows, square), "numbered": (numbered, square), "experts": (experts, square), "spline": (spline, square),
    "a loss of some": (lambda m, x: m.layer(x), square_of_some),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", CASES)
def test_exact(name: str) -> None:
    way, loss = CASES[name]
    model = Model(way)
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    for size in (3, 1, 4):
        x, y = torch.randn(2, size, 6, dtype=torch.float64)
        assert oracle.worst_error(step(x, y).grads, oracle.loop_grads(model, loss, x, y)[1]) < 1e-12


def test_a_statistic_of_what_is_picked_is_refused() -> None:
    model = Model(lambda m, x: [h := m.layer(x), h + h[h > 0].mean()][1])
    step = psg_fx.transform(model, square, quantities=psg_fx.Grads(), backend="eager")
    with pytest.raises(psg_fx.SamplesMixed, match="reduced over them"):
        step(*torch.randn(2, 3, 6, dtype=torch.float64))


@pytest.mark.parametrize("pick", [lambda x: x[x.abs() < 9], lambda x: x.masked_select(x < 9)], ids=["index", "select"])
def test_picked_places_in_the_shape_of_an_input_are_refused(pick: Callable[[Tensor], Tensor]) -> None:
    """Torch's own symbols fail where a sample has a power of two of them."""
    model = Model(lambda m, x: pick(x).view_as(x) * m.each.weight[0])
    step = psg_fx.transform(model, square, quantities=psg_fx.Grads(), backend="eager")
    match = r"of any size\n  where  %_assert_scalar.*;  test_masks_.*\n  why    how many places a mask picks"
    with pytest.raises(psg_fx.NotYetSupported, match=match):
        step(*torch.randn(2, 4, 8, dtype=torch.float64))
