"""Ctrl-C during a first call: all of torch that was replaced is put back, and the next call is right."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.interrupts import deferred, raised_as_it_is
from psg_fx.torch_private import patching
from support import oracle

X, Y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1])


@pytest.fixture(autouse=True)
def _interrupts_are_raised() -> Iterator[None]:
    """A process that was started in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(times: int, done: list[int]) -> None:
    with deferred():
        for k in range(times):
            with deferred():
                signal.raise_signal(signal.SIGINT)
            done.append(k)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_interrupt_comes_at_the_end(times: int) -> None:
    """A second one at once."""
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(times, done)
    assert done == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Interrupting(nn.Module):
    """A linear layer whose forward is interrupted, in the midst of the capture."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.layer, self.interrupts, self.number = nn.Linear(3, 3).double(), [True], number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.interrupts[0]:
            signal.raise_signal(self.number)
        out: torch.Tensor = self.layer(x)
        return out


class TooLong(Exception):
    """What a handler raises."""


@pytest.fixture
def timeouts_are_raised() -> Iterator[None]:
    def handler(*_: object) -> None:
        raise TooLong("no time is left")

    before = signal.signal(signal.SIGALRM, handler)
    yield
    assert signal.getsignal(signal.SIGALRM) is handler
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("timeouts_are_raised")
def test_a_first_call_that_takes_too_long() -> None:
    """Not a refusal of the op whose capture it stopped."""
    model = Interrupting(signal.SIGALRM)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    with pytest.raises(TooLong, match="no time"):
        step(X, Y)
    model.interrupts[0] = False
    _, truth = oracle.loop_grads(model, F.cross_entropy, X, Y)
    assert oracle.worst_error(step(X, Y).grads, truth) < 1e-12


def timed_out(answers: bool) -> None:
    with raised_as_it_is():
        try:
            signal.raise_signal(signal.SIGALRM)
        except TooLong as error:
            if not answers:
                raise ValueError("another reason") from error


@pytest.mark.usefixtures("timeouts_are_raised")
@pytest.mark.parametrize("answers", [False, True])
def test_what_a_handler_raises_is_not_lost(answers: bool) -> None:
    """Whether code between has another error for it, or goes on."""
    with pytest.raises(TooLong):
        timed_out(answers)


def test_a_first_call_that_is_interrupted() -> None:
    model = Interrupting()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    with pytest.raises(KeyboardInterrupt):
        step(X, Y)
    model.interrupts[0] = False
    assert not patching._CHOICES
    assert sys.getprofile() is None
    _, truth = oracle.loop_grads(model, F.cross_entropy, X, Y)
    assert oracle.worst_error(step(X, Y).grads, truth) < 1e-12


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("twice", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        self.twice.add_(2)  # type: ignore[operator]
        out: torch.Tensor = self.layer(x)
        return out


def test_buffers_of_one_call_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied = Counting(), torch.Tensor.copy_
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    step(X, Y)

    def interrupted_copy(self: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        found = copied(self, *args)
        if self is model.calls:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted_copy)
    with pytest.raises(KeyboardInterrupt):
        step(X, Y)
    assert (float(model.calls), float(model.twice)) == (2.0, 4.0)
