"""Labels of rows that lie one after the other, written into zeros of as many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import PsgError
from support.programs import Refused, Row, check_answer, check_refusal

D = 4


class Pairs(nn.Module):
    """Scores of what somebody has taken, then of what he has not: `[2·B]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, taken: Tensor, other: Tensor) -> Tensor:
        return torch.cat([self.layer(taken).square().sum(1), self.layer(other).exp().sum(1)])


def two(size: int) -> tuple[tuple[Tensor, Tensor], None]:
    return (torch.randn(size, D).double(), torch.randn(size, D).double()), None


def loss(label: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda o: F.binary_cross_entropy_with_logits(o, label(o, o.shape[0] // 2))


def ones_first(o: Tensor, n: int) -> Tensor:
    t = torch.zeros(2 * n, dtype=o.dtype)
    t[:n] = 1
    return t


def zeros_last(o: Tensor, n: int) -> Tensor:
    t = torch.ones_like(o)
    t[n:] = 0
    return t


def both(o: Tensor, n: int) -> Tensor:
    t = o.new_full((2 * n,), 0.5)
    t[:n] = 0.9
    t[n:] = 0.1
    return t


def of_values(o: Tensor, n: int) -> Tensor:
    t = torch.zeros_like(o)
    t[n : 2 * n] = o[:n].detach().sigmoid()
    return t


def in_three(o: Tensor, n: int) -> Tensor:
    t = torch.zeros(3 * n, dtype=o.dtype)
    t[n : 2 * n] = 1
    return t.view(3, n).sum(0).repeat(2)


ROWS = {f.__name__: Row(Pairs, loss(f), two) for f in (ones_first, zeros_last, both, of_values, in_three)}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_labels(row: Row) -> None:
    check_answer(row, (5, 1))


def the_first_alone(o: Tensor, n: int) -> Tensor:
    t = torch.zeros_like(o)
    t[:1] = 1
    return t


def all_but_one(o: Tensor, n: int) -> Tensor:
    t = torch.zeros_like(o)
    t[1:] = 1
    return t


OTHERS: dict[str, Refused] = {
    f.__name__: (Pairs, loss(f), two, PsgError, "samples") for f in (the_first_alone, all_but_one)
}


@pytest.mark.parametrize("row", OTHERS.values(), ids=OTHERS)
def test_refused(row: Refused) -> None:
    check_refusal(row)
