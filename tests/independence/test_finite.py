"""What stays finite where a mask of the code's own puts -inf: a softmax of which each row is left a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx import Grads, NotYetSupported
from psg_fx.graph.finite import stays_finite
from support import oracle

Mask = Callable[[Tensor], Tensor]


def ones(x: Tensor) -> Tensor:
    return torch.ones(5, 5, dtype=torch.bool)


LEFT: dict[str, Mask] = {
    "causal": lambda x: ~ones(x).tril(),
    "a window": lambda x: ~(ones(x).tril() & ones(x).triu(-1)),
    "of the last dim": lambda x: torch.arange(5) > 2,
    "for all alike": lambda x: (torch.arange(5) > 2)[None, None],
}
FILLED: dict[str, Mask] = {
    "strictly causal": lambda x: ~ones(x).tril(-1),
    "a window that begins later": lambda x: ~(ones(x).tril(-1) & ones(x).triu(-2)),
    "of all": lambda x: ~ones(x)[:1, :1].logical_not(),
    "of a row": lambda x: (torch.arange(5) < 1)[:, None],
    "given": lambda x: x[0] > 1e9,
    "drawn": lambda x: torch.rand(5, 5) > 0.5,
}


def fills(mask: Mask, softmax: Callable[[Tensor], Tensor]) -> torch.fx.Node:
    """The op that puts -inf where the mask says."""
    graph = make_fx(lambda x: softmax(x.masked_fill(mask(x), -torch.inf)), pre_dispatch=True)(torch.zeros(2, 5, 5))
    return graph.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_fill.Scalar)[0]


@pytest.mark.parametrize("name", LEFT)
def test_rows_that_are_left_a_number(name: str) -> None:
    assert stays_finite(fills(LEFT[name], lambda x: x.softmax(-1)))


@pytest.mark.parametrize("name", FILLED)
def test_rows_that_may_be_filled(name: str) -> None:
    assert not stays_finite(fills(FILLED[name], lambda x: x.softmax(-1)))


def test_rows_lie_along_the_dim_of_the_softmax() -> None:
    later = {"columns": lambda x: (torch.arange(5) < 1)[:, None], "rows": lambda x: torch.arange(5) < 1}
    assert stays_finite(fills(later["columns"], lambda x: x.softmax(1)))
    assert not stays_finite(fills(later["rows"], lambda x: x.softmax(1)))
    assert not stays_finite(fills(later["rows"], lambda x: x.softmax(0)))


def test_a_logarithm_is_not_finite_there() -> None:
    assert not stays_finite(fills(LEFT["causal"], lambda x: x.log_softmax(-1)))


def test_no_number_is_drawn() -> None:
    fill = fills(FILLED["drawn"], lambda x: x.softmax(-1))
    before = torch.get_rng_state()
    stays_finite(fill)
    assert torch.equal(torch.get_rng_state(), before)


class Attention(nn.Module):
    """Attends to what is before, and for samples that a mask picks."""

    def __init__(self, diagonal: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.diagonal = nn.Linear(4, 3), diagonal

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, m = self.linear(x), y > 0
        if m.any():
            past = torch.ones(5, 5, dtype=torch.bool).tril(self.diagonal)
            attended = (h @ h.transpose(1, 2)).masked_fill(~past, float("-inf")).softmax(-1) @ h
            h = torch.where(m[:, None, None], attended, h)
        return h[:, 1:]


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


def test_an_arm_that_attends_to_nothing_is_left_out() -> None:
    """Its gradients would be no numbers for samples that the mask leaves out."""
    step = psg_fx.transform(Attention(-1).double(), loss, quantities=Grads(), backend="eager")
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    assert step((x, torch.tensor([0, 0, 0]))).grads["linear.weight"].isfinite().all()
    with pytest.raises(NotYetSupported, match="a mask picks something"):
        step((x, torch.tensor([0, 1, 0])))


def test_an_arm_that_attends_to_what_is_there_is_answered() -> None:
    model: Any = Attention(0).double()
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    for y in ([0, 1, 0], [0, 0, 0]):
        given = torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor(y)
        _, want = oracle.loop_grads(model, loss, given)
        assert oracle.worst_error(step(given).grads, want) < 1e-10
