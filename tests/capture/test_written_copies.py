"""A write into what is a copy for several samples, and the value itself for one: refused where that matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads, NotYetSupported
from support import oracle

Code = Callable[[Tensor], Tensor]


class Written(nn.Module):
    """h `[B, T, 3]` seen as t `[T, B, 3]`, which is contiguous for B = 1 only."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.cat([self.code(h.transpose(0, 1)).transpose(0, 1), h], 1)


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


REFUSED: dict[str, Code] = {
    "contiguous": lambda t: t.contiguous().relu_(),
    "a view of it": lambda t: t.contiguous()[0].mul_(2.0)[None],
    "reshape": lambda t: t.reshape(-1, 3).relu_().reshape(t.shape),
    "twice": lambda t: t.contiguous().add_(1.0).relu_(),
}
ANSWERED: dict[str, Code] = {
    "clone": lambda t: t.clone().relu_(),
    "not in place": lambda t: t.contiguous().relu(),
    "another value": lambda t: (t.contiguous() + 1.0).relu_(),
    "itself": lambda t: t.relu_(),
}


def data() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 2, 3, dtype=torch.float64)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    step = psg_fx.transform(Written(REFUSED[name]).double(), loss, quantities=Grads(), backend="eager")
    with pytest.raises(NotYetSupported, match="a write in place treats a batch of one sample differently") as caught:
        step(data())
    assert "test_written_copies.py:" in str(caught.value)


@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name: str) -> None:
    model, x = Written(ANSWERED[name]).double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10


def test_refused_where_the_first_batch_hides_it() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            h = self.layer(x)
            k = h.transpose(0, 1).contiguous().mul_(2.0).transpose(0, 1)
            return k.sin().flatten(1).sum(1) + (w > 0.5) * h.sum((1, 2))

    step = psg_fx.transform(Weighted().double(), lambda out: out.square().sum(), quantities=Grads(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"where sum \(test_written_copies.py:[^\0]*\) gives another value"):
        step((data(), torch.zeros(4, dtype=torch.float64)))


def test_answered_where_nothing_reads_the_value_any_more() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).transpose(0, 1).contiguous().relu_().transpose(0, 1)  # type: ignore[no-any-return]

    model, x = Last().double(), data()
    _, want = oracle.loop_grads(model, loss, (x,))
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    assert oracle.worst_error(step(x).grads, want) < 1e-10
