"""What Python objects hold, asked without running their code."""

from __future__ import annotations

import enum
import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from psg_fx.torch_private.modes import NO_FUNCTION

MISSING = object()
"""Stands for what is not there, where None may be."""


def describe(tensor: torch.Tensor) -> Any:
    """All of a tensor but its values."""
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    bits = tensor.is_neg() or tensor.is_conj()
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, bits


def has_own_functions(tensor: torch.Tensor) -> bool:
    """Whether torch's functions do something else on the tensor, by a `__torch_function__` of its class: of a class
    that torch itself knows how to trace, or that says it has torch's own results, it does not count.
    """
    kind = type(tensor)
    own: Any = kind.__torch_function__
    ordinary = (torch.Tensor.__torch_function__.__func__, NO_FUNCTION)  # type: ignore[attr-defined]
    return getattr(own, "__func__", own) not in ordinary and not kind.__module__.startswith(_TRACED)


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper around others that a `__torch_dispatch__` of its class computes with: quantised
    weights, for one.
    """
    kind = type(tensor)
    return hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith(_TRACED)


_TRACED = ("torch._subclasses", "torch.distributed", "torch.nn.parameter", "torchvision.tv_tensors")


def contents(cell: types.CellType) -> Any:
    """What a closure's cell holds, or MISSING."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def class_of_storage(held: Any) -> Any:
    """Whose functions read what a dict stores, whatever a class of its own does where one is asked for."""
    return OrderedDict if isinstance(held, OrderedDict) else dict if isinstance(held, dict) else type(held)


def attribute_dict(value: Any) -> dict[str, Any] | None:
    """Where an object keeps its attributes; None where it keeps them elsewhere."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def functions_of(attribute: Any) -> list[FunctionType]:
    """The functions behind an attribute of a class."""
    if isinstance(attribute, property):
        parts = [attribute.fget, attribute.fset]
    elif isinstance(attribute, (staticmethod, classmethod)):
        parts = [attribute.__func__]
    elif isinstance(attribute, functools.cached_property):
        parts = [attribute.func]
    else:
        parts = [attribute]
    return [p for p in parts if isinstance(p, FunctionType)]


def slots_of(kind: type) -> Iterable[str]:
    """The names that a class and those before it keep in `__slots__`."""
    for owner in kind.__mro__:
        named = owner.__dict__.get("__slots__", ())
        for name in (named,) if isinstance(named, str) else named:
            if name.startswith("__") and not name.endswith("__"):  # as Python writes a private name
                yield f"_{owner.__name__.lstrip('_')}{name}"
            elif name not in ("__dict__", "__weakref__"):
                yield name


def slot(value: Any, name: str) -> Any:
    """What lies in a slot, or MISSING; no code of the object's runs."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return MISSING


def results_of_cache(cache: Any) -> list[Any]:
    """All that a `functools.lru_cache` holds."""
    held, entries, before = _parts_of_cache(cache)
    results = [result for result in entries.values() if type(result) is not _LINK]
    # of a cache with bounds: a key, its result and the type of a link, one after the other
    return results + [held[k - 1] for k in range(before) if held[k] is _LINK]


def objects_of_cache(cache: Any) -> list[Any]:
    """What a `functools.lru_cache` holds that can change: no numbers, texts or tensors, and no tuples of such."""
    return [result for result in results_of_cache(cache) if not is_value(result)]


def keys_of_cache(cache: Any) -> frozenset[Any]:
    """For what a `functools.lru_cache` holds results."""
    return frozenset(_parts_of_cache(cache)[1])


def keep_in_cache(cache: Any, keys: frozenset[Any]) -> None:
    """Let a `functools.lru_cache` hold what it has for these keys, and nothing else."""
    entries = _parts_of_cache(cache)[1]
    if not keys:
        cache.cache_clear()
        return
    for key in set(entries) - keys:
        del entries[key]


def take_tensors_from_cache(cache: Any) -> dict[Any, Any]:
    """The entries of a `functools.lru_cache` whose results are tensors, which it has no longer: `put_into_cache`."""
    held, entries, before = _parts_of_cache(cache)
    results = {key: result for key, result in entries.items() if type(result) is not _LINK}
    results |= {held[k - 2]: held[k - 1] for k in range(before) if held[k] is _LINK}
    return {key: entries.pop(key) for key, result in results.items() if _has_tensor(result) and key in entries}


def put_into_cache(cache: Any, taken: dict[Any, Any]) -> None:
    """What was taken from it."""
    if taken:
        _parts_of_cache(cache)[1].update(taken)


def _has_tensor(result: Any) -> bool:
    return isinstance(result, torch.Tensor) or (isinstance(result, tuple) and any(map(_has_tensor, result)))


def _parts_of_cache(cache: Any) -> tuple[list[Any], dict[Any, Any], int]:
    """What it refers to, the dict of its entries among that, and where this lies."""
    held = gc.get_referents(cache)
    place = next((k for k, each in enumerate(held) if each is cache.__wrapped__ and type(held[k - 1]) is dict), 0)
    return (held, held[place - 1], place - 1) if place else (held, {}, 0)


def is_value(result: Any) -> bool:
    """Whether it is a number, a text, a tensor or the like, or a tuple of such, which none changes in place."""
    if isinstance(result, (tuple, frozenset)):
        return all(map(is_value, result))
    return result is None or isinstance(result, _VALUES)


_VALUES = (
    bool, int, float, complex, str, bytes, range, slice, enum.Enum, torch.Tensor, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def _kept() -> None:
    """Is asked once, so that its cache holds a link."""


_kept()
_LINK = type(next(iter(next(h for h in gc.get_referents(_kept) if type(h) is dict).values())))


class Functions:
    """All functions there are: found once, when they are first asked for."""

    def of(self, codes: Iterable[types.CodeType]) -> list[FunctionType]:
        """Those that run one of these codes, or an equal one."""
        return [f for code in codes for f in self._named(code.co_name) if f.__code__ == code]

    def _named(self, name: str) -> list[FunctionType]:
        seen = self._seen.get(name, ())
        hidden = [f for known in _FROZEN.known.get(name, ()) if (f := known()) is not None]
        return list(dict.fromkeys([*hidden, *seen]))

    @functools.cached_property
    def _seen(self) -> dict[str, list[FunctionType]]:
        """Looked for among all objects, so it takes a while."""
        return _functions()


def _functions() -> dict[str, list[FunctionType]]:
    """The functions that garbage collection sees, by the names of their codes."""
    objects = gc.get_objects()
    _FROZEN.look(objects)
    return _by_name(objects)


def _by_name(objects: Iterable[Any]) -> dict[str, list[FunctionType]]:
    found: dict[str, list[FunctionType]] = {}
    for each in objects:
        if type(each) is FunctionType:
            found.setdefault(each.__code__.co_name, []).append(each)
    return found


class _Frozen:
    """The functions that `gc.freeze()` has hidden: all objects are thawed once after each, and hidden again.

    mark: an object made since, which another `gc.freeze()` would have hidden, too.  known: by the names of their codes.
    """

    def __init__(self) -> None:
        self.mark: list[object] | None = None
        self.known: dict[str, list[weakref.ref[FunctionType]]] = {}

    def look(self, seen: Sequence[Any]) -> None:
        """seen: the objects that are not hidden."""
        if any(each is self.mark for each in seen) or not gc.get_freeze_count():
            return
        gc.collect()  # so that no garbage is frozen below
        gc.unfreeze()
        try:
            found = _by_name(gc.get_objects())
        finally:
            gc.freeze()
        self.known = {name: [weakref.ref(each) for each in functions] for name, functions in found.items()}
        self.mark = [self]


_FROZEN = _Frozen()


def is_array(value: Any) -> bool:
    """Whether it is one of numpy's, of numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype != object


def is_array_of_objects(value: Any) -> bool:
    """Whether it is one of numpy's, that holds Python's objects."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype == object
