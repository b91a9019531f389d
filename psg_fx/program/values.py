"""Python values as something hashable that is equal where a captured graph is the same."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
LONG = 64


class Same:
    """An object that equals itself only; it is kept, so that no other takes its place."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return f"{type(self.thing).__name__} at {id(self.thing):#x}"


class Once:
    """A large key whose hash is taken once."""

    def __init__(self, key: Any) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Once) and self._key == other._key)


def constant_key(value: Any, depth: int = 3) -> Any:
    """Something hashable that is equal for values of the same meaning: 1, 1.0 and True differ."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)) and depth and len(value) <= LONG:
        return type(value), tuple(constant_key(v, depth - 1) for v in value)
    if isinstance(value, dict) and depth and len(value) <= LONG:
        return type(value), tuple((constant_key(k, 0), constant_key(v, depth - 1)) for k, v in value.items())
    return Same(value)
