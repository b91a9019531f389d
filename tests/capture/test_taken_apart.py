"""Values that are taken apart sample by sample and put together again, as `torch.cat(list(x))` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import PsgError
from support.programs import B, Row, check_answer, square


class Model(nn.Module):
    """`forward(model, h)` with h `[B, 4, 3]`."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.run = nn.Linear(2, 3), nn.Linear(3, 3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.layer(x))).tanh()


def cat_of_list(h: Tensor) -> Tensor:
    return torch.cat(list(h), dim=0).view(-1, 4, 3)


def cat_of_others(h: Tensor) -> Tensor:
    return torch.cat(list(h), dim=1).T.reshape(-1, 3, 4).mT


def stacked(h: Tensor) -> Tensor:
    return torch.stack(h.unbind(0))


def stacked_behind(h: Tensor) -> Tensor:
    return torch.stack(list(h.transpose(0, 1).unbind(1)), dim=1).transpose(0, 1)


def split(h: Tensor) -> Tensor:
    return torch.cat(h.flatten(0, 1).split([4] * len(h))).view(-1, 4, 3)


def in_chunks(h: Tensor) -> Tensor:
    return torch.cat(torch.chunk(h, h.shape[0]), 0)


WAYS = (cat_of_list, cat_of_others, stacked, stacked_behind, split, in_chunks)


def draw(size: int) -> tuple[Tensor, None]:
    return torch.randn(size, 4, 2).double(), None


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("run", WAYS)
def test_equals_the_loop(run: Callable[[Tensor], Tensor]) -> None:
    check_answer(Row(lambda: Model(run), square, draw))


def swapped(h: Tensor) -> Tensor:
    return torch.stack(list(h)[::-1])


def without_the_last(h: Tensor) -> Tensor:
    return torch.stack([*list(h)[:-1], h[0]])


@pytest.mark.parametrize("run", [swapped, without_the_last])
def test_others_are_refused(run: Callable[[Tensor], Tensor]) -> None:
    step = psg_fx.transform(Model(run), square, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(PsgError):
        step(torch.randn(B, 4, 2))
