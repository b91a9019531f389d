"""Rows picked by a mask, whose number depends on the data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx import PsgError, SamplesMixed
from support.programs import (
    B,
    C,
    Refused,
    Row,
    T,
    check_answer,
    check_refusal,
    head,
    program,
    square,
    tokens,
)
from support.selection import one_in


def padded(size: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Labels of which some are -100, all of them in the second sample; and a mask."""
    labels = torch.randint(C, (size, T))
    labels[torch.rand(size, T) < 0.4] = -100
    labels[0, 1] = 2
    labels[1:2] = -100
    return torch.randn(size, T, 4).double(), (labels, (labels >= 0))


def picked(o: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """The labels as `o` is shaped, and 0 where they say nothing."""
    return F.one_hot(y.clamp(min=0), C).to(o)


def each(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.transpose(1, 2), y, reduction="none")


def itself(o: Tensor) -> Tensor:
    return o


MASKED = {
    "mean": Row(head, lambda o, y, m: each(o, y)[m].mean(), padded),
    "sum over count": Row(head, lambda o, y, m: each(o, y)[m].sum() / m.sum(), padded),
    "sum over size or one": Row(head, lambda o, y, m: each(o, y)[m].sum() / max(each(o, y)[m].shape[0], 1), padded),
    "sum over size and more": Row(head, lambda o, y, m: each(o, y)[m].sum() / (each(o, y)[m].numel() + 1e-6), padded),
    "sum times a part": Row(head, lambda o, y, m: each(o, y)[m].sum() * (1 / (each(o, y)[m].shape[0] + 1)), padded),
    "sum over size": Row(head, lambda o, y, m: 2 * each(o, y)[m].sum() / each(o, y)[m].shape[0], padded),
    "sum over numel": Row(head, lambda o, y, m: o[m].square().sum() / o[m].numel(), padded),
    "rows of logits": Row(head, lambda o, y, m: F.cross_entropy(o[y != -100], y[y != -100]), padded),
    "flat rows": Row(
        head, lambda o, y, m: F.cross_entropy(o.reshape(-1, C)[y.view(-1) >= 0], y.view(-1)[y.view(-1) >= 0]), padded
    ),
    "masked_select": Row(
        head, lambda o, y, m: torch.masked_select((o - picked(o, y, m)).square(), m[..., None]).mean(), padded
    ),
    "masked_select of each": Row(
        head, lambda o, y, m: F.l1_loss(o[..., 0].masked_select(m), y.masked_select(m).to(o.dtype)), padded
    ),
    "two masks": Row(
        head, lambda o, y, m: o[y == 1].square().sum() - (o[y == 2].sin().sum(-1) * 3).mean().nan_to_num(), padded
    ),
    "an op that only the picked rows allow": Row(
        head, lambda o, y, m: (o[o > 0].log().sum() + (o[m] - 1).norm(dim=-1).sum() + o[m].exp().sum(0).norm()), padded
    ),
    "folded rows": Row(
        head, lambda o, y, m: (o[m].reshape(-1).sin() * 2).mean() + o[m].view(-1, C, 1).flatten().cos().sum(), padded
    ),
    "a parameter after the mask": Row(
        program(lambda x, m, w, v: F.layer_norm(x[m] @ w, (C,), v).square().mean(), w=(4, C), v=(C,)), itself,
        lambda n: ((torch.randn(n, T, 4).double(), padded(n)[1][1]), None),
    ),
    "time major": Row(head, lambda o, y, m: each(o, y).t()[m.t()].mean(), padded),
    "columns that all samples share": Row(
        head, lambda o, y, m: o[:, torch.tensor([True, False, True, True, False])].square().mean(), padded
    ),
    "the largest and the least": Row(
        head, lambda o, y, m: o[m | (y < 3)].max() - 2 * o[m | (y < 3)].amin() + 0 * o.sum(), padded
    ),
    "any": Row(head, lambda o, y, m: o.square().sum() * (o[m] > 0.5).any() * (o[m] > -9).all(), padded),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(3, MASKED))
def test_equals_the_loop(name: str) -> None:
    check_answer(MASKED[name], (B,))


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(7, MASKED))
def test_of_one_sample(name: str) -> None:
    """Such a program is captured for each batch size."""
    check_answer(MASKED[name], (1,))


REFUSED: dict[str, Refused] = {
    "a mask over samples in the model": (
        program(lambda x, w: (x @ w)[(x.sum((1, 2)) > 0)].mean() + (x @ w), w=(4, C)), square, tokens, PsgError, "",
    ),
    "a mean of masked rows in the model": (
        program(lambda x, w: (x @ w) - (x @ w)[x[..., 0] > 0].mean(0), w=(4, C)), square, tokens, SamplesMixed, "",
    ),
    "rows that the model returns": (
        program(lambda x, w: (x @ w)[x[..., 0] > 0].cumsum(0), w=(4, C)), square, tokens, PsgError, "a mask picks",
    ),
    "rows in an order": (
        head, lambda o, y, m: o[m].sort(0).values.cumsum(0).mean(), padded, PsgError, "a mask picks",
    ),
    "rows less their mean": (
        head, lambda o, y, m: (o[m] - o[m].mean(0)).square().mean(), padded, PsgError, "",
    ),
    "rows of one mask with those of another": (
        head, lambda o, y, m: (o[m] - o[~m]).sum(), padded, PsgError, "",
    ),
    "a variance of rows": (
        head, lambda o, y, m: o[m].var(), padded, PsgError, "a mask picks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])
