"""A parameter that is written at a place of no dims (`index_put` with a number) beside rows of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.programs import Row, check_answer, program, square, tokens

TWO = torch.tensor(2)


def put(places: Callable[[Tensor], tuple[Tensor, ...]], accumulate: bool) -> Callable[..., Any]:
    def run(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        return h.index_put((torch.arange(h.shape[0]), *places(h)), v, accumulate=accumulate)

    return run


PLACES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], tuple[tuple[int, ...], ...]]] = {
    "a row": (lambda h: (TWO,), ((1,), (6,), (1, 6), (1, 1))),
    "a number": (lambda h: ((h[..., 0] > 0).sum(1).clamp(max=2), TWO), ((1,),)),
}
ROWS = {
    f"{name} {shape}{' added' * accumulate}": Row(program(put(places, accumulate), w=(4, 6), v=shape), square, tokens)
    for name, (places, shapes) in PLACES.items()
    for shape in shapes
    for accumulate in (False, True)
}


@pytest.mark.parametrize("name", ROWS)
def test_equals_the_loop(name: str) -> None:
    check_answer(ROWS[name])
