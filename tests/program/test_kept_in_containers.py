"""What code keeps in the places of a list or dict: there after every step, in whichever list or dict is there then."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from support import oracle
from support.programs import square

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)


class Keeping(nn.Module):
    """`keep(held, a, b)` on the way, where `held` is what the model keeps values in."""

    def __init__(self, keep: Callable[[Any, Tensor, Tensor], Any], held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.keep, self.held = keep, held

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).tanh()
        b = self.second(a)
        found = self.keep(self.held, a, b)
        return b if found is None else found  # type: ignore[no-any-return]


def detached(held: Any, a: Tensor, b: Tensor) -> None:
    held[0] = a.detach()


def two(held: Any, a: Tensor, b: Tensor) -> Tensor:
    """Deep supervision: what the heads give is kept, and read in the same call."""
    held[0], held[1] = a, b * 2
    return held[0] + held[1]


def shifted(held: Any, a: Tensor, b: Tensor) -> None:
    held[0], held[1] = held[1], b.detach()


def a_size(held: Any, a: Tensor, b: Tensor) -> None:
    held[1] = {"rows": a.shape[0], "mean": a.detach().mean(0)}


def in_turn(held: Any, a: Tensor, b: Tensor) -> None:
    if isinstance(held, list):
        held.append(b.detach())
        held.pop(0)


KEEP = [detached, two, shifted, a_size, in_turn]
MAKE: dict[str, Callable[[], Any]] = {"list": lambda: [None, None], "dict": lambda: {0: None, 1: None}}


def values(held: Any) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else held


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.allclose(one, other, rtol=1e-13, atol=1e-13)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return bool(one == other)


@pytest.mark.filterwarnings("ignore:captured for the third time")
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("keep", KEEP, ids=lambda f: f.__name__)
def test_kept_as_by_an_ordinary_forward(keep: Any, kind: str) -> None:
    model, ordinary = (Keeping(keep, MAKE[kind]()) for _ in range(2))
    step = psg_fx.transform(model, square, quantities=psg_fx.Grads(), backend="eager")
    for size in (4, 2, 4, 1):
        losses, grads = oracle.loop_grads(Keeping(keep, MAKE[kind]()), square, X[:size], None)  # with nothing kept
        out = step(X[:size])
        ordinary(X[:size])
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12
        assert all(map(same, values(model.held), values(ordinary.held)))
        assert len(values(model.held)) == 2


@pytest.mark.parametrize("kind", MAKE)
def test_another_list_or_dict_in_its_place(kind: str) -> None:
    """Users empty what a model keeps by a new one: the old one stays as it is."""
    model = Keeping(two, MAKE[kind]())
    step = psg_fx.transform(model, square, quantities=psg_fx.Norms(), backend="eager")
    step(X)
    for size in (3, 2):
        old = model.held
        before = [value.shape for value in values(old)]
        model.held = MAKE[kind]()
        step(X[:size])
        assert [value.shape for value in values(model.held)] == [(size, 3)] * 2
        assert [value.shape for value in values(old)] == before
    assert len(step.captures) == 1


def test_a_list_that_is_too_short_fails_as_the_code_does() -> None:
    model = Keeping(detached, [None, None])
    step = psg_fx.transform(model, square, quantities=psg_fx.Norms(), backend="eager")
    step(X)
    model.held.clear()
    with pytest.raises(psg_fx.BadArgument, match="IndexError: list assignment index out of range"):
        step(X)
    assert model.held == []


def test_a_namespace_that_the_code_makes_and_looks_at() -> None:
    """It has no weak references, by which other objects are known as a step's own."""

    def remembered(held: Any, a: Tensor, b: Tensor) -> Tensor | None:
        first, held[0] = held[0] is None, SimpleNamespace(size=a.shape[0], last=b.detach())
        return b if first else None

    step = psg_fx.transform(Keeping(remembered, [None]), square, backend="eager")
    for _ in range(4):
        step(X)
    assert len(step.captures) == 2
    assert step.model.held[0].last.shape == (5, 3)


class Lazy(dict[str, Any]):
    """Makes its values when one is asked for, and not all of them can be made."""

    def __getitem__(self, key: str) -> Any:
        if key == "broken":
            message = "an optional package is not installed"
            raise ImportError(message)
        return super().__getitem__(key)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]


def test_a_dict_that_makes_its_values_is_asked_for_none() -> None:
    lazy = Lazy({"tanh": torch.tanh, "broken": None})
    model = Keeping(lambda held, a, b: held["tanh"](b), lazy)
    step = psg_fx.transform(model, square, quantities=psg_fx.Grads(), backend="eager")
    losses, grads = oracle.loop_grads(model, square, (X,))
    torch.testing.assert_close(step(X).losses, losses)
    assert oracle.worst_error(step(X).grads, grads) < 1e-12
    dict.__setitem__(lazy, "tanh", torch.sin)
    assert oracle.relative_error(step(X).losses, oracle.loop_grads(model, square, (X,))[0]) < 1e-12
