"""Statistics of the batch that a forward only keeps in a buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psg_fx import SamplesMixed
from support.programs import (
    C,
    Refused,
    Row,
    check_answer,
    check_refusal,
    flat,
    images,
    square,
)
from support.selection import one_in


class Logging(nn.Module):
    """A layer, and a buffer that `write(self, h)` writes while its output h is passed on."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, C), write
        self.extra = nn.Parameter(torch.randn(C))
        self.register_buffer("seen", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            self.write(self, h)
        return h.sin()


class Reading(Logging):
    """The buffer enters the output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.seen


def running(m: Any, h: Tensor) -> None:
    m.seen.mul_(0.9).add_(0.1 * (h.mean(0) + m.extra * h.shape[0]))


def covered(m: Any, h: Tensor) -> None:
    """Ops that no rule allows over samples."""
    m.seen.copy_((h - h.mean(0)).abs().amax(0) + h.sort(0).values[0] + h.t().matmul(h).diagonal().cumsum(0))


def instance_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True))


LOGGED = {
    "a mean": Row(lambda: Logging(lambda m, h: m.seen.copy_(h.mean(0))), square, flat),
    "a running mean": Row(lambda: Logging(running), square, flat),
    "anything": Row(lambda: Logging(covered), square, flat),
    "the first sample": Row(lambda: Logging(lambda m, h: m.seen.copy_(h[0])), square, flat),
    "instance norm": Row(instance_norm, square, images),
    "momentum": Row(lambda: nn.InstanceNorm2d(2, True, 0.3, affine=True, track_running_stats=True), square, images),
}


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", one_in(2, LOGGED))
def test_equals_the_loop(name: str) -> None:
    check_answer(LOGGED[name])


REFUSED: dict[str, Refused] = {
    "a logged mean that is read": (
        lambda: Reading(lambda m, h: m.seen.copy_(h.mean(0))), square, flat, SamplesMixed, "reduced over them by %mean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])
