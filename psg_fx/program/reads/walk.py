"""From what was observed to what it means: every value that the code could read, in one fixed order.

Two walks that find the same `meaning` belong to programs that capture alike.  On the way the places of those values are
noted, so that a later call can ask of each in one step whether the same object lies there (`guard`).

| value | its meaning |
| --- | --- |
| a number, a text, `None`, a dtype, ... | its type and itself |
| a tensor | shape, strides, dtype, device, whether it requires gradients, and which of the tensors before it it is |
| a tensor whose value Python looked at | that value too |
| a list, dict, set, array, partial, method | what it holds |
| a function | itself and its code; if it ran: its defaults, what it closes over, and the globals that it names |
| a module (`nn.Module`), class, other object | itself, and of its attributes those that were read or are named |
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import weakref
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_modules

from psg_fx.program.code import is_theirs, nested, origin_of_module
from psg_fx.program.decisions.questions import FOR_ITS_VALUE
from psg_fx.program.made_objects import is_made
from psg_fx.program.objects import (
    MISSING,
    Functions,
    attribute_dict,
    class_of_storage,
    describe,
    is_array,
    is_array_of_objects,
    is_value,
    results_of_cache,
    slot,
    slots_of,
)
from psg_fx.program.reads.observed import Observed
from psg_fx.program.reads.walk_code import ASKING, CodeWalk, Place
from psg_fx.program.values import Same

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip
_PLAIN = (
    type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, range,
    slice, type(Ellipsis), datetime.date, datetime.datetime, datetime.timedelta, decimal.Decimal, fractions.Fraction,
    pathlib.PurePath, re.Pattern,
)  # fmt: skip
_CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque, collections.OrderedDict, MappingProxyType)
_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_UNLOOKED = ("logging", "threading", "_thread", "io", "_io", "socket", "asyncio", "multiprocessing", "concurrent",
             "weakref", "random", "contextlib", "inspect", "abc", "unittest", "queue", "selectors")  # fmt: skip
"""Standard modules whose objects are not looked into: they change all the time and no program's numbers follow them."""


class Walk(CodeWalk):
    """What the code could read, as it is now.  functions_there: all there are; walks at one time may share them."""

    def __init__(self, observed: Observed, functions_there: Functions | None = None) -> None:
        super().__init__(observed)
        self.functions_there = functions_there or Functions()

    def run(self, roots: Iterable[tuple[str, Any]]) -> Walk:
        """Visit the roots, such as the loss function, and all that was read of modules."""
        for label, value in roots:
            self.visit(value, label)
        for module, names in list(self.observed.reads.values()):
            self.of_module(module, names)
        for held, name, label in self.observed.counted:
            kind = type(held.get(name, MISSING))
            self.emit((kind,), label)
            self.items.append((lambda held=held, name=name: (type(held.get(name, MISSING)),), (kind,)))  # type: ignore[misc]
        for name in _GLOBAL_HOOKS:
            self.visit(getattr(of_modules, name), name)
        self.all_left()
        self.rest()
        return self

    def rest(self) -> None:
        """Functions that ran and were reached in no way that is followed here: out of a table, say."""
        for code in self.observed.code:
            found = self.observed.named(code)
            if code not in self._met and getattr(found, "__code__", None) is code:
                self.visit(found, code.co_qualname)
                self.all_left()
        self.of_tensors()
        self.all_left()
        inside = {inner for code in self._met for inner in nested(code)}
        missing = [code for code in self.observed.code if code not in inside]
        within = {inner for code in missing for inner in nested(code) if inner is not code}
        missing = [code for code in missing if code not in within]
        if missing:
            for f in self.functions_there.of(missing):
                self.visit(f, f.__qualname__)
            self.all_left()

    def one(self, value: Any, label: str, place: Place | None) -> None:
        """One value; what it holds is visited later."""
        kind = type(value)
        if kind in (float, complex):
            return self.emit((kind, repr(value)), label)
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            self.emit((kind, repr(value) if kind is slice else value), label)
            return None if kind in _PLAIN else self.own_class(value, label)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, label, place)
        if (index := self._seen.get(id(value))) is not None:
            return self.emit(("again", index), label)
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        for kinds, look in _LOOKS:
            if isinstance(value, kinds):
                return look(self, value, label)
        return self.thing(value, label)

    def tensor(self, value: torch.Tensor, label: str, place: Place | None) -> None:
        """A tensor: its description, and which one of those met before it is."""
        index = self._order.setdefault(id(value), len(self._order))
        self._alive.append(value)
        self.emit((index, describe(value)), label)
        self.tensors.append((value, place))
        if (same := Same(value)) in self.observed.values:
            asked = self.observed.values[same]
            for question in [FOR_ITS_VALUE] if asked is None else asked:
                answered = question.asked_of(value)
                self.emit(str(answered), f"the value of {label}")
                self.looked.append((value, answered))

    def of_tensors(self) -> None:
        """Attributes that the user gave to some tensors, of all tensors: those that code names; and where code may ask
        for one that is not there, which there are.
        """
        tensors = list({id(t): t for t, _ in self.tensors}.values())
        if self.attributes & ASKING:
            held = [vars(t) for t in tensors]
            self.keys.append((functools.partial(map, len, held), tuple(map(len, held))))
        names = set().union(*(vars(t) for t in tensors)) & self.attributes
        for name in sorted(names):
            for t in tensors:
                self.look(vars(t), name, f"{name} of a tensor")

    def container(self, value: Any, label: str) -> None:
        """What holds others in an order, or by keys; and as an object of a class of its own, attributes."""
        self.containers.append(value)
        self.held(value, label)
        if type(value) not in _CONTAINERS:
            self.own_class(value, label)
        if isinstance(value, collections.defaultdict):
            self.items.append((lambda: (value.default_factory,), (value.default_factory,)))
            self.visit(value.default_factory, f"the default of {label}")

    def own_class(self, value: Any, label: str) -> None:
        """What an object of a class derived from one of Python's has beside."""
        if (own := attribute_dict(value)) is not None:
            self.attributes_of(own, label, self.open)
        self.of_class(type(value), ())

    def held(self, value: Any, label: str) -> None:
        """What a container holds."""
        if isinstance(value, (dict, MappingProxyType)):
            kind = class_of_storage(value)
            stored = tuple(kind.items(value))  # others may add to it meanwhile
            self.keys.append((kind.keys.__get__(value), tuple(k for k, _ in stored)))
            self.items.append((kind.values.__get__(value), tuple(v for _, v in stored)))
            self.emit((type(value), len(stored)), label)
            for key, held in stored:
                self.emit(_key(key), label)
                self.visit(held, f"{label}[{key!r}]", (value, key) if isinstance(value, dict) else None)
            return
        held = tuple(tuple.__iter__(value) if isinstance(value, tuple) else value)  # a kind of tuple may have no length
        if not isinstance(value, (tuple, frozenset)):
            self.items.append((value.__iter__, held))
        if isinstance(value, (set, frozenset)):
            self.emit((type(value), frozenset(_key(v) for v in held)), label)
            return
        self.emit((type(value), len(held)), label)
        for i, entry in enumerate(held):
            self.visit(entry, f"{label}[{i}]")

    def of_module(self, module: nn.Module, names: Iterable[str]) -> None:
        """What was read of a module, and its hooks."""
        kind = type(module)
        own = module.__dict__
        self.emit((Same(module), Same(kind)), kind.__name__)
        for name in names:
            if name == "__dict__":
                self.keys.append((own.keys, tuple(own)))
                self.emit(tuple(own), f"the attributes of a {kind.__name__}")
                continue
            holder = next((own[g] for g in ("_parameters", "_buffers", "_modules") if name in own.get(g, ())), None)
            if holder is None:
                found = self.look(own, name, f"{kind.__name__}.{name}")
                if found is not MISSING:
                    continue
                self.of_class(kind, (name,))
            else:
                self.look(holder, name, f"{kind.__name__}.{name}")
        self.of_class(kind, ())
        hooked = [bool(own[name]) for name in HOOKS]
        self.emit(tuple(hooked), f"the hooks of a {kind.__name__}")
        if any(hooked):
            for name in (*HOOKS, *_FLAGS):
                self.look(own, name, f"the hooks of a {kind.__name__}")
        else:
            self.hookless.append(own)

    def through(self, meaning: Any, parts: Iterable[Any], label: str) -> None:
        """What stands for others: they are what counts."""
        self.emit(meaning, label)
        for part in parts:
            self.visit(part, label)

    def cache(self, value: Any, label: str) -> None:
        """A cached function, and what its cache had for the capture: as long as that is there, others may be added.

        What a capture has made is no longer there, so objects that come then are others.
        """
        kept: tuple[Any, ...] = self.observed.kept.setdefault(Same(value), tuple(results_of_cache(value)))
        objects = [each for each in kept if not is_value(each)]
        there = functools.partial(_still_there, value, kept, bool(objects))
        self.keys.append((there, tuple(there())))
        self.through((Same(value), *there()), (value.__wrapped__, *objects), label)
        self.attributes_of(value.__dict__, label, self.open)

    def thing(self, value: Any, label: str) -> None:
        """Any other object."""
        kind = type(value)
        if is_array(value):
            self.emit((kind, str(value.dtype), value.shape, value.tobytes()), label)
            self.arrays.append((value, value.copy()))
            return
        if is_array_of_objects(value):
            self.emit((kind, str(value.dtype), value.shape), label)
            self.items.append((lambda: list(value.flat), tuple(value.flat)))
            for i, held in enumerate(value.flat):
                self.visit(held, f"{label}[{i}]")
            return
        own_kind = is_made(value)
        self.emit(("made" if own_kind else Same(value), Same(kind)), label)
        self.kinds.append((value, kind))
        if str(kind.__module__).partition(".")[0] in _UNLOOKED and not own_kind:
            return
        if hasattr(kind, "__next__"):
            self.iterators.append(label)
        every = self.open or own_kind or not all(_has_names_only(k) for k in kind.__mro__[:-1])
        if (own := attribute_dict(value)) is not None:
            self.attributes_of(own, label, every)
        for name in slots_of(kind):
            if every or name in self.attributes:
                held = slot(value, name)
                self.emit("absent" if held is MISSING else name, label)
                self.items.append((lambda v=value, n=name: (slot(v, n),), (held,)))  # type: ignore[misc]
                if held is not MISSING:
                    self.visit(held, f"{label}.{name}")
        self.of_class(kind, ())

    def attributes_of(self, own: dict[str, Any], label: str, every: bool) -> None:
        """The attributes of an object, or those that some code names."""
        self.keys.append((own.keys, tuple(own)))
        for name in list(own):
            if every or name in self.attributes or name == "__wrapped__":
                self.emit(name, label)
                self.look(own, name, f"{label}.{name}")


_LOOKS: tuple[tuple[Any, Callable[[Walk, Any, str], None]], ...] = (
    (_CONTAINERS, Walk.container),
    (nn.Module, lambda walk, value, label: walk.emit(Same(value), label)),
    (FunctionType, Walk.function),
    # another object each time it is looked up
    (MethodType, lambda walk, value, label: walk.through("method", (value.__self__, value.__func__), label)),
    (
        functools.partial,
        lambda walk, v, label: walk.through("partial", (v.func, v.args, v.keywords, vars(v)), label),
    ),
    (BuiltinMethodType, lambda walk, value, label: walk.through(value.__name__, (value.__self__,), label)),
    (_VIEWS, lambda walk, value, label: walk.through(type(value).__name__, (value.mapping,), label)),
    (type, Walk.type),
    (ModuleType, Walk.module),
    (functools._lru_cache_wrapper, Walk.cache),
    (weakref.ref, lambda walk, value, label: walk.through("reference", (value(),), label)),
)


def _still_there(cache: Any, kept: tuple[Any, ...], with_objects: bool) -> tuple[bool]:
    """Whether a cache has all that it had; or has no objects, as it had none."""
    now = results_of_cache(cache)
    known = set(map(id, now))
    if not all(id(each) in known or (is_value(each) and _among(each, now)) for each in kept):
        return (False,)
    return (with_objects or all(map(is_value, now)),)


def _among(value: Any, values: list[Any]) -> bool:
    return not isinstance(value, torch.Tensor) and any(type(v) is type(value) and v == value for v in values)


def _has_names_only(kind: type) -> bool:
    """Whether a class of objects gives away their attributes by their names alone, as far as is known."""
    return kind in (SimpleNamespace, argparse.Namespace) or is_theirs(origin_of_module(kind.__module__))


def _key(value: Any) -> Any:
    return (type(value), value) if isinstance(value, (str, int, bytes, type(None))) else Same(value)
