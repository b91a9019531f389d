"""Numbers that code reads out of tensors and only raises by: `if labels.max().item() >= n: raise ...`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument, PsgError
from support.programs import B, Row, check_answer, square

LIMIT = 50


class Checked(nn.Module):
    """A layer whose inputs are looked at by `check(self, x)`."""

    def __init__(self, check: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.check, self.limit = nn.Linear(4, 3), check, LIMIT

    def forward(self, x: Tensor) -> Tensor:
        self.check(self, x)
        return self.layer(x)  # type: ignore[no-any-return]


def an_item(model: Any, x: Tensor) -> None:
    if x.max().item() > model.limit:
        raise ValueError


def asserted(model: Any, x: Tensor) -> None:
    assert x.max().item() <= LIMIT


def a_switch(model: Any, x: Tensor) -> None:
    wrong = torch.any(x > LIMIT).item()
    if wrong:
        raise ValueError


def of_a_helper(model: Any, x: Tensor) -> None:
    if not fits(x):
        raise ValueError


def fits(x: Tensor) -> bool:
    return (x <= LIMIT).all().item()  # type: ignore[return-value]


def computed_with(model: Any, x: Tensor) -> None:
    if (x > LIMIT).sum().item() - 1 >= 0 or 2 * x.max().item() > 2 * LIMIT + 1:
        raise ValueError


def a_chain(model: Any, x: Tensor) -> None:
    if not -1000 <= x.min().item() <= x.max().item() <= LIMIT:
        raise ValueError


def a_bool(model: Any, x: Tensor) -> None:
    if bool((x > LIMIT).any()):
        raise ValueError


def an_int(model: Any, x: Tensor) -> None:
    if int((x > model.limit).sum()) >= 1:
        raise ValueError


def a_float(model: Any, x: Tensor) -> None:
    if not float(x.max()) <= model.limit:
        raise ValueError


def equal_count(model: Any, x: Tensor) -> None:
    if int((x > LIMIT).sum()) != 0:
        raise ValueError


def close(model: Any, x: Tensor) -> None:
    if not torch.allclose(x.clamp(max=LIMIT), x):
        raise ValueError


def equal(model: Any, x: Tensor) -> None:
    if not x.clamp(max=LIMIT).equal(x):
        raise ValueError


CHECKS = [
    an_item, asserted, a_switch, of_a_helper, computed_with, a_chain, a_bool, an_int, a_float, equal_count, close,
    equal,
]  # fmt: skip


def inputs(size: int) -> tuple[Tensor, None]:
    return torch.randn(size, 4).double(), None


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_equals_the_loop(check: Any) -> None:
    check_answer(Row(lambda: Checked(check), square, inputs))


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_looked_at_at_every_call(check: Any) -> None:
    step = psg_fx.transform(Checked(check).double(), square, backend="eager")
    x, _ = inputs(B)
    step(x)
    wrong = torch.where(torch.arange(B)[:, None] == B - 1, 70.0, x)
    with pytest.raises(BadArgument, match=r"the code of the model or loss refuses these values\n  where  test_checked"):
        step(wrong)
    step(x)
    assert len(step.captures) == 1


def two_arms(model: Any, x: Tensor) -> None:
    if x.max().item() > LIMIT:
        model.layer(x)


def one_of_several(model: Any, x: Tensor) -> None:
    if any([x.max() > LIMIT, x.min() < -1000]):
        raise ValueError


def of_a_function(model: Any, x: Tensor) -> None:
    if math.isinf(x.max().item()):
        raise ValueError


def another_bool(model: Any, x: Tensor) -> None:
    if not opposite(x.max() > LIMIT):
        raise ValueError


def opposite(value: Any) -> bool:
    return not value


def kept_for_later(model: Any, x: Tensor) -> None:
    found = float(x.max())
    if found > LIMIT:
        raise ValueError


def in_a_loop(model: Any, x: Tensor) -> None:
    for value in numbers(x):
        if value > LIMIT:
            raise ValueError


def numbers(x: Tensor) -> Iterable[float]:
    return x.flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "check", [two_arms, one_of_several, of_a_function, another_bool, kept_for_later, in_a_loop],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_stays_refused(check: Any) -> None:
    step = psg_fx.transform(Checked(check).double(), square, backend="eager")
    with pytest.raises(PsgError) as error:
        step(inputs(B)[0])
    assert "test_checked_numbers.py" in str(error.value)
