"""What an argument of a call that is no tensor holds, as something hashable: two calls have one graph if it is equal.

A graph has the values of such arguments, so all that code could read of them counts: what they contain, their
attributes and those of their classes, also where the object does not count these when it is pickled or compared.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from psg_fx.program.objects import attribute_dict, slot, slots_of
from psg_fx.program.values import LONG, Same, constant_key

_ITSELF = (type, FunctionType, BuiltinFunctionType, ModuleType)
_PLAIN: tuple[type, ...] = (type(None), bool, int, str, bytes, float, complex)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}


def argument(value: Any) -> Any:
    """Equal for arguments of the same meaning."""
    known = constant_key(value)
    if type(value) in _PLAIN or isinstance(value, _ITSELF):
        return known
    return _pickled(value) if isinstance(known, Same) else known, _State().of(value)


def _pickled(value: Any) -> Any:
    try:
        return type(value), pickle.dumps(value)
    except Exception:  # whatever keeps an object from being pickled
        return Same(value)


class _State:
    """One walk through an argument.  seen: the objects on the way, by `id`, with a number each."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return constant_key(value)
        if isinstance(value, _ITSELF):
            return Same(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)  # so that no other object has its id meanwhile
        return kind, _of_class(kind), self._content(value), self._attributes(value)

    def _content(self, value: Any) -> Any:
        """What it has beside attributes."""
        if isinstance(value, MethodType):
            return Same(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return tuple(self.of(part) for part in (value.func, value.args, value.keywords))
        if isinstance(value, (list, tuple, deque, dict)) and len(value) <= LONG:
            parts = [p for item in value.items() for p in item] if isinstance(value, dict) else value
            return tuple(self.of(part) for part in parts)
        if plain := next((each for each in _PLAIN[2:] if isinstance(value, each)), None):
            return plain.__repr__(value)  # type: ignore[call-arg]
        own = attribute_dict(value) is not None or any(True for _ in slots_of(type(value)))
        return None if own and not isinstance(value, _WITH_CONTENT) else _pickled(value)

    def _attributes(self, value: Any) -> Any:
        names = {name: slot(value, name) for name in slots_of(type(value))} | (attribute_dict(value) or {})
        return tuple((name, self.of(own)) for name, own in names.items())


_WITH_CONTENT = (list, tuple, deque, dict, set, frozenset, bytearray)


def _of_class(kind: type) -> Any:
    """The attributes of the classes that are none of a library: methods, too, may be replaced."""
    return tuple(
        (name, constant_key(own))
        for owner in kind.__mro__ if owner.__module__.partition(".")[0] not in _LIBRARIES
        for name, own in vars(owner).items() if name not in ("__dict__", "__weakref__", "__doc__")
    )  # fmt: skip
