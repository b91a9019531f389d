"""What libraries find out and look up while a model runs: plans by shapes, functions by name, orders of products."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_effects import X, Y, step_of
from torch import Tensor

from psg_fx import NotYetSupported


class Plan:
    """What a library has found out for some shapes."""


PLANS: dict[Any, Any] = {}


@pytest.mark.parametrize("key", [str, lambda shape: ("plan", f"{shape[0]}x{shape[1]}")])
@pytest.mark.parametrize("made", [Plan, lambda: 2])
def test_what_is_kept_by_shapes_is_of_the_capture(key: Callable[[Any], Any], made: Callable[[], Any]) -> None:
    """Whose batch size is a symbol: an entry under its name would mean nothing."""
    PLANS.clear()

    def effect(model: Any, h: Tensor) -> Tensor:
        kept = PLANS.setdefault(key(tuple(h.shape)), made())
        return h if isinstance(kept, Plan) else h * kept

    step = step_of(effect)
    out, same = step(X, Y), step_of(lambda model, h: h if made is Plan else 2 * h)(X, Y)
    assert torch.allclose(out.losses, same.losses)
    assert not PLANS


LOOKED_UP: dict[str, Any] = {}


@pytest.mark.parametrize("found", [torch.tensordot, torch.add, torch, F.relu], ids=lambda v: v.__name__)
def test_what_is_looked_up_is_kept(found: Any) -> None:
    """A module or a function that holds nothing: every step keeps it as an ordinary call does."""
    LOOKED_UP.clear()

    def effect(model: Any, h: Tensor) -> Tensor:
        LOOKED_UP["found"] = found
        return h.sin()

    step = step_of(effect)
    for _ in range(2):
        LOOKED_UP.clear()
        out = step(X, Y)
        assert {"found": found} == LOOKED_UP
    assert torch.allclose(out.losses, step_of(lambda model, h: h.sin())(X, Y).losses)


def test_a_function_that_holds_something_is_refused() -> None:
    def effect(model: Any, h: Tensor) -> Tensor:
        LOOKED_UP["found"] = lambda: h
        return h

    with pytest.raises(NotYetSupported, match="the code changes LOOKED_UP"):
        step_of(effect)(X, Y)


def test_orders_of_contractions(monkeypatch: pytest.MonkeyPatch) -> None:
    """opt_einsum asks for shapes here: numbers, as the capture has them."""
    parser = ModuleType("opt_einsum.parser")
    parser.get_shape = lambda operand: operand.shape  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opt_einsum.parser", parser)

    def effect(model: Any, h: Tensor) -> Tensor:
        return h.sin() if all(type(size) is int for size in parser.get_shape(h)) else h

    step, same = step_of(effect), step_of(lambda model, h: h.sin())
    for size in (2, 4):
        assert torch.allclose(step(X[:size], Y[:size]).losses, same(X[:size], Y[:size]).losses)
    assert len(step.captures) == 1
