"""Arguments of a call that are no tensors: whatever code could read of them is another graph when it changes."""

from __future__ import annotations

import collections
import enum
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

X, Y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 2, 1])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return self.layer(x) * given.k  # type: ignore[no-any-return]


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("k",)


class Silent:
    """What it is pickled by leaves out what counts."""

    def __init__(self, k: float) -> None:
        self.k = k

    def __getstate__(self) -> dict[str, int]:
        return {"n": 1}

    def __setstate__(self, state: Any) -> None:
        self.k = 0.0


class OfClass:
    k = 0.0


class Kind(enum.Enum):
    ONE = 1


class Array(np.ndarray[Any, Any]):
    pass


def set_on(value: Any) -> Callable[[float], Any]:
    """One object, whose attribute is set for each call."""

    def given(k: float) -> Any:
        value.k = k
        return value

    return given


def new(kind: type, *arguments: Any) -> Callable[[float], Any]:
    """An object of a class of a plain one, for each call."""
    own = type("Own", (kind,), {})
    return lambda k: set_on(own(*arguments))(k)


def of_class(k: float, one: Any = OfClass()) -> Any:  # noqa: B008
    OfClass.k = k
    return one


class OfProperty:
    k = 0.0


def property_of_class(k: float, one: Any = OfProperty()) -> Any:  # noqa: B008
    OfProperty.k = property(lambda self: k)  # type: ignore[assignment]
    return one


def within(k: float, one: Any = Holder(Holder(lambda: 0))) -> Any:  # noqa: B008
    one.held.k = k
    return SimpleNamespace(k=one.held.k, of=one)


GIVEN: dict[str, Callable[[float], Any]] = {
    "an object with a function": set_on(SimpleNamespace(act=torch.tanh, f=lambda: 0)),
    "an object with a lock": set_on(Holder(threading.Lock())),
    "slots": set_on(Slotted()),
    "not pickled": Silent,
    "of the class": of_class,
    "a property of the class": property_of_class,
    "an object in an object": within,
    "a member of an enumeration": set_on(Kind.ONE),
    "an array": lambda k: set_on(np.ones(2).view(Array))(k),
} | {
    f"a {kind.__name__}": new(kind, *arguments) for kind, *arguments in (
        (str, "k"), (int, 3), (float, 3.0), (list, [1]), (dict, {"a": 1}), (tuple, (1,)), (set, {1}),
        (collections.OrderedDict, {"a": 1}), (collections.deque, [1]),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_what_changes_is_seen(name: str) -> None:
    model = Scaled()
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for k in (1.0, 2.0, 2.0):
        given = GIVEN[name](k)
        scaled = oracle.loop_grads(model, lambda out, y: F.cross_entropy(out, y), (X, SimpleNamespace(k=k)), Y)[1]
        assert oracle.worst_error(step((X, given), Y).grads, scaled) < 1e-12
    assert len(step.captures) == 2 if name in SAME else len(step.captures) <= 3


SAME = ("slots", "an array", "a str", "a list", "an object with a lock", "an object with a function")
"""Of these the last call is known to be like the one before."""
