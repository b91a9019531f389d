"""What the arguments of a custom function hold, to see whether it changes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from psg_fx.tensors import SYMBOLS

_WHOLE = (torch.Tensor, torch.Size, *SYMBOLS, nn.Module, type, FunctionType, MethodType, ModuleType)
"""What is not looked into: a module's attributes are those of the program."""
_PLAIN = frozenset({int, float, bool, str})
_MOST = 10_000


def held_by(arguments: Sequence[Any]) -> list[Any]:
    """What containers and objects among the arguments hold, and these in turn, in an order that stays the same; of
    the tensors that they hold, how often they were written.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = list(arguments)
    own = set(map(id, arguments))
    while waiting and len(found) < _MOST:
        value = waiting.pop()
        found.append(value)
        if isinstance(value, torch.Tensor) and id(value) not in own and not value.is_inference():
            found.append(value._version)
        if id(value) in seen or isinstance(value, _WHOLE):
            continue
        seen.add(id(value))
        inside = _inside(value)
        found.append(len(inside))
        waiting += inside
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        own = list(value)
    else:
        own = [*value.keys(), *value.values()] if isinstance(value, dict) else []
    attributes = getattr(value, "__dict__", {})
    return [*own, *attributes, *attributes.values()]


def are_the_same(one: list[Any], other: list[Any]) -> bool:
    """Whether nothing has been added, removed or replaced."""
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b) for a, b in zip(one, other, strict=True)
    )
