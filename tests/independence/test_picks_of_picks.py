"""Rows that a mask picks from rows that another one has picked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psg_fx import PsgError
from support.programs import Refused, Row, check_answer, check_refusal, head, program, square, tokens


def labels(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4).double(), torch.arange(size) % 3


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`function(h)` for activations h [B, T, C]."""
    return program(lambda x, w: function(x @ w), w=(4, 3))


def picked(o: Tensor, y: Tensor) -> Tensor:
    rows = o[y > 0]
    return rows[rows[:, 0] > 0].square().sum()


def three_times(o: Tensor, y: Tensor) -> Tensor:
    rows, classes = o[y >= 0], y[y >= 0]
    rows, classes = rows[classes > 0], classes[classes > 0]
    return (rows[classes < 2] * classes[classes < 2].unsqueeze(1)).exp().sum()


def weighted(o: Tensor, y: Tensor) -> Tensor:
    valid = y > 0
    losses, classes = F.cross_entropy(o[valid], y[valid], reduction="none"), y[valid]
    losses[classes == 2] *= 3
    return losses.sum()


def hard(o: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(o, y, reduction="none")[y >= 0]
    return losses[losses > 1.0].sum()


def by_masked_select(o: Tensor, y: Tensor) -> Tensor:
    found = o.masked_select(o > 0)
    return found.masked_select(found < 0.5).square().sum()


def both_used(o: Tensor, y: Tensor) -> Tensor:
    rows = o[y > 0]
    return rows.sin().sum() + rows[rows[:, 1] < 0].cos().sum()


def written(h: Tensor) -> Tensor:
    out, inside = torch.zeros_like(h), h.abs() < 0.5
    values = h[inside].clone()
    values[values < 0] = values[values < 0].exp()
    out[inside] = values
    return out


def tokens_by_experts(h: Tensor) -> Tensor:
    mask, out = h[..., 0] > 0, h.clone()
    rows, chosen = h[mask], (h[..., 1] > 0).long()[mask]
    made = torch.zeros_like(rows)
    made[chosen == 0] = rows[chosen == 0].sin()
    made[chosen == 1] = rows[chosen == 1] * 2
    out[mask] = made
    return out


ROWS = {f.__name__: Row(head, f, labels) for f in (picked, three_times, weighted, hard, by_masked_select, both_used)}
ROWS |= {f.__name__: Row(of(f), square, tokens) for f in (written, tokens_by_experts)}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_picks_of_picks(row: Row) -> None:
    check_answer(row, (6, 1))


def above_their_mean(o: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(o, y, reduction="none")[y > 0]
    return losses[losses > losses.mean()].sum()


def the_first_two(o: Tensor, y: Tensor) -> Tensor:
    rows = o[y > 0]
    return rows[rows[:, 0] > 0][:2].sum()


MIXED: dict[str, Refused] = {
    f.__name__: (head, f, labels, PsgError, "a mask picks a number of rows") for f in (above_their_mean, the_first_two)
}


@pytest.mark.parametrize("row", MIXED.values(), ids=MIXED)
def test_refused_where_rows_mix(row: Refused) -> None:
    check_refusal(row)
