"""Conditions on values that only raise: they are looked at at every call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, CaptureFailed, NotYetSupported
from support.programs import (
    B,
    C,
    Refused,
    Row,
    check_answer,
    check_refusal,
    square,
)


class Checked(nn.Module):
    """A layer whose labels are looked at by `check(y)`."""

    def __init__(self, check: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(4, C), check

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y.max() >= C or not (y >= -100).all():
            raise ValueError(f"label out of range: {y}")
        self.check(y)
        return F.cross_entropy(self.layer(x), y)


def in_helper(y: Tensor) -> None:
    with torch.no_grad():
        if not bool_of(y):
            message = "no label is small"
            raise ValueError(message)


def bool_of(y: Tensor) -> Tensor:
    return (y < C).any()


def after_a_flag(y: Tensor, strict: bool = True) -> None:
    if strict and y.min() < 0:
        raise ValueError


def before_a_flag(y: Tensor, strict: bool = True, also: Any = None) -> None:
    fine = (y >= 0).all()
    if not fine and not also and strict:
        raise ValueError


def asserted(y: Tensor) -> None:
    assert (y < C).all(), f"labels must be below {C}"
    torch._assert((y >= 0).all(), "labels must be positive")


def checked_by_torch(y: Tensor) -> None:
    torch._check_tensor_all(y < C)
    torch._check_tensor_all((y >= 0).all(), lambda: "labels must be positive")


def asserted_later(y: Tensor) -> None:
    torch._assert_async((y < C).all())
    torch._assert_async((y >= 0).all(), "labels must be positive")


def known(y: Tensor) -> None:
    """A condition that is known while the program is captured."""
    if torch.tensor(3.0) > 4:
        raise ValueError


def labelled(size: int) -> tuple[Any, None]:
    return (torch.randn(size, 4).double(), torch.randint(C, (size,))), None


def itself(o: Tensor) -> Tensor:
    return o


CHECKS = {
    f.__name__: f for f in (in_helper, after_a_flag, before_a_flag, asserted, checked_by_torch, asserted_later, known)
}


CHECKED = {name: Row(lambda f=f: Checked(f), itself, labelled) for name, f in CHECKS.items()}


def two_arms(y: Tensor) -> Tensor:
    if y.max() > 1:
        return y + 1
    return y


def without_its_flag(y: Tensor, strict: bool = False) -> Tensor:
    if y.max() > 1 and strict:
        raise ValueError
    return y


def with_a_flag_of_its_own(y: Tensor, strict: bool = True) -> Tensor:
    if y.max() > 1 and [strict := y.ndim > 1] and strict:
        raise ValueError
    return y


def caught(y: Tensor) -> Tensor:
    try:
        if y.max() > 1:
            raise ValueError
    except ValueError:
        y = y + 1
    return y


def caught_of_torch(y: Tensor) -> None:
    try:
        torch._check_tensor_all(y < 1)
    except RuntimeError:
        y.sum()


def suppressed(y: Tensor) -> None:
    with torch.no_grad(), contextlib.suppress(ValueError):
        if y.max() > 1:
            raise ValueError


def caught_outside(y: Tensor) -> None:
    with contextlib.suppress(TypeError):
        try:
            asserted(y)
        except AssertionError:
            y.sum()


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("name", CHECKED)
def test_equals_the_loop(name: str) -> None:
    check_answer(CHECKED[name])


REFUSED: dict[str, Refused] = {
    "a branch of two arms": (
        lambda: Checked(two_arms), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "an error that a switch turns off": (
        lambda: Checked(without_its_flag), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "an error by a switch that is written": (
        lambda: Checked(with_a_flag_of_its_own), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "an error that is caught": (
        lambda: Checked(caught), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "an error of torch that is caught": (
        lambda: Checked(caught_of_torch), itself, labelled, NotYetSupported, "_is_all_true cannot be shown",
    ),
    "an error that is suppressed": (
        lambda: Checked(suppressed), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
    "an error that is caught outside": (
        lambda: Checked(caught_outside), itself, labelled, CaptureFailed, "branches on values of a tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_stays_refused(name: str) -> None:
    check_refusal(REFUSED[name])


@pytest.mark.parametrize("name", ["in_helper", "asserted", "checked_by_torch", "asserted_later"])
def test_a_check_is_looked_at_at_every_call(name: str) -> None:
    step = psg_fx.transform(Checked(CHECKS[name]).double(), itself, backend="eager")
    inputs, _ = labelled(B)
    step(inputs)
    x, y = inputs
    with pytest.raises(BadArgument) as caught:
        step((x, torch.full_like(y, C)))
    line = Checked.forward.__code__.co_firstlineno + 1
    assert str(caught.value).splitlines()[:2] == [
        "the code of the model or loss refuses these values",
        f"  where  test_checks.py:{line}: if y.max() >= C or not (y >= -100).all():",
    ]
    if name == "asserted":
        with pytest.raises(BadArgument, match=r"where  .*: torch\._assert"):
            step((x, torch.full_like(y, -100)))
    if name == "checked_by_torch":
        with pytest.raises(BadArgument, match=r"where  .*: torch\._check_tensor_all\(\(y >= 0"):
            step((x, torch.full_like(y, -100)))
    step(inputs)


def test_a_failed_check_leaves_buffers_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, C)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            h = self.layer(x)
            if h.abs().max() > 1e3:
                raise ValueError("too large")
            return h

    for loss in (square, None):
        model = Counting()
        step = psg_fx.transform(model, loss, backend="eager")
        step(torch.ones(B, 4))
        with pytest.raises(BadArgument, match=r"if h\.abs"):
            step(torch.full((B, 4), 1e6))
        assert model.seen == 1
