"""Sizes of which nothing but the number is read, and which a batch of one sample has otherwise than larger ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Grads
from psg_fx.errors import PsgError
from support import oracle

Asked = Callable[[Tensor], Any]


class Net(nn.Module):
    """Multiplies samples of class 2 by what is asked; the last sample of a batch may be none of these."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.asked = nn.Linear(4, 3), asked

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x)
        return h * torch.where(y == 2, self.asked(h), 1)[:, None]  # type: ignore[no-any-return]


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


def narrowed(h: Tensor) -> int:
    try:
        h.narrow(0, 0, 2)
    except RuntimeError:
        return 1
    return 2


def second(h: Tensor) -> float:
    try:
        h[1].sum()
    except IndexError:
        return 1.0
    return 2.0


def unused(h: Tensor) -> int:
    assert len(h[:2]) > 0
    return 3


REFUSED: dict[str, Asked] = {
    "a slice": lambda h: h[:2].shape[0],
    "from the end": lambda h: h[-2:].shape[0],
    "of elements": lambda h: h.reshape(-1)[:5].numel(),
    "of a slice": lambda h: len(h[:, :1][:2]),
    "whether it fails": narrowed,
}
ANSWERED: dict[str, Asked] = {
    "one row": lambda h: h[:1].shape[0] + 1,
    "another dim": lambda h: h[:, :2].shape[1],
    "of a sample": lambda h: h[0].shape[0],
    "all rows": lambda h: h[: h.shape[0]].shape[1],
    "the second row": second,
    "not used": unused,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    step = psg_fx.transform(Net(REFUSED[name]).double(), loss, quantities=Grads(), backend="eager")
    with pytest.raises(PsgError) as caught:
        step((torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 1, 0])))
    assert caught.value.why


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", ANSWERED)
def test_answered(name: str) -> None:
    model: Any = Net(ANSWERED[name]).double()
    step = psg_fx.transform(model, loss, quantities=Grads(), backend="eager")
    for y in ([2, 1, 0], [1, 2], [2]):
        given = torch.randn(len(y), 4, dtype=torch.float64), torch.tensor(y)
        _, want = oracle.loop_grads(model, loss, given)
        assert oracle.worst_error(step(given).grads, want) < 1e-10
