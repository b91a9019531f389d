"""`ctc_loss`, whose samples lie in four arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported, PsgError
from support import oracle
from support.programs import (
    Refused,
    Row,
    check_answer,
    check_refusal,
    head,
)


def spoken(size: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Labels 1 and 2 with a repetition, their lengths (one of them 0), and the lengths of the inputs."""
    labels = torch.tensor([[1, 2, 2], [2, 1, 1], [1, 1, 2]]).repeat(size, 1)[:size]
    lengths = torch.tensor([2, 0, 1]).repeat(size)[:size]
    return torch.randn(size, 6, 4).double(), (labels, torch.tensor([6, 4, 5]).repeat(size)[:size], lengths)


def ctc(reduction: str, **options: Any) -> Callable[..., Tensor]:
    def loss(o: Tensor, y: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        time_major = o.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(time_major, y, steps, lengths, reduction=reduction, **options)

    return loss


def ctc_of_all_steps(o: Tensor, y: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    size = o.shape[0]
    return nn.CTCLoss(zero_infinity=True)(o.log_softmax(-1).transpose(0, 1), y, [6] * size, [3] * size)


def ctc_of_picked(o: Tensor, y: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    """Padded labels are picked by a mask, not all of them at the front."""
    y = torch.where(torch.arange(3, device=y.device) >= 3 - lengths[:, None], y, -100)
    mask = y >= 0
    return ctc("mean")(o, y.masked_select(mask), steps, mask.sum(-1))


def ctc_of_indexed(o: Tensor, y: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    mask = y != 1
    return ctc("sum", zero_infinity=True)(o, y[mask], steps, mask.long().sum(dim=1))


CTC = {
    "picked by a mask": Row(head, ctc_of_picked, spoken),
    "indexed by a mask": Row(head, ctc_of_indexed, spoken),
    "mean": Row(head, ctc("mean"), spoken),
    "sum": Row(head, ctc("sum", blank=2 - 2), spoken),
    "none": Row(head, ctc("none"), spoken),
    "impossible targets": Row(
        head, lambda o, y, s, n: ctc("mean", zero_infinity=True)(o, y, s - 4, torch.full_like(n, 3)) + o.mean(), spoken
    ),
    "numbers for lengths": Row(head, ctc_of_all_steps, spoken),
}


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", CTC)
def test_equals_the_loop(name: str) -> None:
    check_answer(CTC[name])


@pytest.mark.inductor
def test_compiled() -> None:
    """Log-probabilities `[B, T, C]` that are transposed: the op's answers lie as they were said to."""
    model, (x, targets) = nn.Linear(4, 4).double(), spoken(4)
    out = psg_fx.transform(model, ctc("none"))(x, targets)
    losses, grads = oracle.loop_grads(model, ctc("none"), x, targets)
    assert oracle.relative_error(out.losses, losses) < 1e-12
    assert oracle.worst_error(out.grads, grads) < 1e-12


REFUSED: dict[str, Refused] = {
    "targets of all samples in one dim": (
        head, lambda o, y, s, n: ctc("sum")(o, y[:, :2].reshape(-1), s, torch.full_like(n, 2)), spoken, NotYetSupported,
        "pass padded targets",
    ),
    "picked by a mask, with other lengths": (
        head, lambda o, y, s, n: ctc("sum")(o, y[y > 1], s, (y > 0).sum(-1) - 1), spoken, NotYetSupported,
        "pass padded targets",
    ),
    "lengths as different numbers": (
        head, lambda o, y, s, n: ctc("sum")(o, y, [6, 5, 4], n), spoken, NotYetSupported, "pass them as tensors",
    ),
    "ctc over the samples": (
        head, lambda o, y, s, n: F.ctc_loss(o.log_softmax(-1), y[:1].expand(6, 3), [3] * 6, [2] * 6), spoken, PsgError,
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])
