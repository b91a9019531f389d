"""What a captured graph has baked in beside tensors: attributes of modules, arguments, what a loss closes over.

The attributes are those that the code reads while it is captured. Plain values are compared by value, all others by
what they are: an object whose inside changes looks the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import torch
from torch import nn

_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
_LONG = 64
_OF_EVERY_MODULE = frozenset(name for name in nn.Module().__dict__ if not name.startswith("_forward"))
_MADE_BY_EXPORT = ("torch.export", "torch.fx", "torch._")
Reads = set[tuple["Same", str]]
"""Modules, and the names of the attributes that were read of them."""


class Same:
    """An object that equals itself only; it is kept, so that no other takes its place."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def baked(value: Any, depth: int = 3) -> Any:
    """Something hashable that is equal for values of the same meaning: 1, 1.0 and True differ."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)) and depth and len(value) <= _LONG:
        return type(value), tuple(baked(v, depth - 1) for v in value)
    if isinstance(value, dict) and depth and len(value) <= _LONG:
        return type(value), tuple((baked(k, 0), baked(v, depth - 1)) for k, v in value.items())
    return Same(value)


def argument(value: Any) -> Any:
    """The same for an argument of a call that is not a tensor: an array or a record counts by all that it holds."""
    known = baked(value)
    if not isinstance(known, Same) or isinstance(value, (type, FunctionType)):
        return known
    try:
        return type(value), pickle.dumps(value)
    except Exception:  # whatever keeps an object from being pickled
        return known


def function(value: Any) -> Any:
    """The same for a loss function: with its defaults, what it closes over, and the globals that it names."""
    if isinstance(value, functools.partial):
        return Same(value), function(value.func), baked(value.args), baked(value.keywords)
    if isinstance(value, MethodType):
        return _with_attributes(value.__self__), function(value.__func__)
    if not isinstance(value, FunctionType):
        return _with_attributes(value)
    try:
        closed = inspect.getclosurevars(value)
    except ValueError:  # a name that has no value yet
        return Same(value)
    names = (*closed.nonlocals.items(), *closed.globals.items())
    given = baked(value.__defaults__), baked(value.__kwdefaults__)
    return Same(value), given, tuple((name, baked(v)) for name, v in names)


def _with_attributes(value: Any) -> Any:
    """An object and its attributes; those of a module are noted as they are read."""
    is_module = isinstance(value, nn.Module)
    return Same(value), None if is_module else baked(getattr(value, "__dict__", None))


@contextlib.contextmanager
def attributes_read(found: Reads) -> Iterator[None]:
    """Note every attribute that is read of a module in the meantime, but for its parameters, buffers and children."""
    original: Callable[[Any, str], Any] = nn.Module.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        value = original(self, name)
        if name in _OF_EVERY_MODULE or name.startswith("__") or type(self).__module__.startswith(_MADE_BY_EXPORT):
            return value
        if name in original(self, "__dict__"):
            found.add((Same(self), name))
        return value

    with mock.patch.object(nn.Module, "__getattribute__", read):
        yield


def values_read(reads: Reads) -> Any:
    """What those attributes are now."""
    return frozenset((module, name, baked(module.thing.__dict__.get(name))) for module, name in reads)
