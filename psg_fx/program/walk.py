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

import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_modules

from psg_fx.program.code import is_theirs, names_of, nested, origin_of_module
from psg_fx.program.objects import (
    MISSING,
    attribute_dict,
    contents,
    describe,
    everything,
    functions_of,
    is_array,
    slots_of,
)
from psg_fx.program.observe import Observed
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
_CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque)
_UNLOOKED = ("logging", "threading", "_thread", "io", "_io", "socket", "asyncio", "multiprocessing", "concurrent",
             "weakref", "random", "contextlib", "inspect", "abc", "unittest", "queue", "selectors")  # fmt: skip
"""Standard modules whose objects are not looked into: they change all the time and no program's numbers follow them."""

Place = tuple[dict[Any, Any], Any]


class Walk:
    """What the code could read, as it is now.

    meaning, labels: one entry for each value met, and how a user would write it.
    slots, classes: `(dict, key, value)` that were looked up, of objects and of classes.
    keys, items: what to iterate, and what that gave: names, and things.
    tensors: those met, and the dict in which they lie, if they lie in one.
    """

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        names = [names_of(code) for code in observed.code]
        self.attributes = frozenset().union(*(n.attributes for n in names))
        self.open = any(n.open for n in names)
        self.meaning: list[Any] = []
        self.labels: list[str] = []
        self.slots: list[tuple[dict[Any, Any], Any, Any]] = []
        self.classes: list[tuple[MappingProxyType[str, Any], str, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.functions: list[FunctionType] = []
        self.keys: list[tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]] = []
        self.items: list[tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]] = []
        self.arrays: list[tuple[Any, Any]] = []
        self.looked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tensors: list[tuple[torch.Tensor, Place | None]] = []
        self.hookless: list[dict[str, Any]] = []
        self.iterators: list[str] = []
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._order: dict[int, int] = {}
        self._met: set[CodeType] = set()
        self._classes: set[type] = set()
        self._asked: set[tuple[type, str]] = set()

    def run(self, roots: Iterable[tuple[str, Any]]) -> Walk:
        """Visit the roots, such as the loss function, and all that was read of modules."""
        for label, value in roots:
            self.visit(value, label)
        for module, names in list(self.observed.reads.values()):
            self.of_module(module, names)
        for name in _GLOBAL_HOOKS:
            self.visit(getattr(of_modules, name), name)
        self.rest()
        return self

    def rest(self) -> None:
        """Functions that ran and were reached in no way that is followed here: out of a table, say."""
        for code in self.observed.code:
            found = self.observed.named(code)
            if code not in self._met and getattr(found, "__code__", None) is code:
                self.visit(found, code.co_qualname)
        self.of_tensors()
        inside = {inner for code in self._met for inner in nested(code)}
        missing = [code for code in self.observed.code if code not in inside]
        within = {inner for code in missing for inner in nested(code) if inner is not code}
        missing = [code for code in missing if code not in within]
        if missing:
            wanted = {code: index for index, code in enumerate(missing)}
            found = [f for f in everything() if type(f) is FunctionType and f.__code__ in wanted]
            for f in sorted(found, key=lambda f: wanted[f.__code__]):
                self.visit(f, f.__qualname__)

    def emit(self, meaning: Any, label: str) -> None:
        """One entry."""
        self.meaning.append(meaning)
        self.labels.append(label)

    def look(self, holder: dict[Any, Any], key: Any, label: str) -> Any:
        """What lies under a key, or MISSING; visited."""
        value = holder.get(key, MISSING)
        self.slots.append((holder, key, value))
        if value is MISSING:
            self.emit("absent", label)
        else:
            self.visit(value, label, (holder, key))
        return value

    def visit(self, value: Any, label: str, place: Place | None = None) -> None:
        """One value, and what it holds."""
        kind = type(value)
        if kind in (float, complex):
            return self.emit((kind, repr(value)), label)
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return self.emit((kind, repr(value) if kind is slice else value), label)
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
        if Same(value) in self.observed.values:
            self.emit(tuple(value.detach().flatten().tolist()), f"the value of {label}")
            self.looked.append((value, value.detach().clone()))

    def of_tensors(self) -> None:
        """Attributes that the user gave to some tensors, of all tensors: those that code names."""
        tensors = list({id(t): t for t, _ in self.tensors}.values())
        names = set().union(*(vars(t) for t in tensors)) & self.attributes
        for name in sorted(names):
            for t in tensors:
                self.look(vars(t), name, f"{name} of a tensor")

    def container(self, value: Any, label: str) -> None:
        """What holds others in an order, or by keys."""
        if isinstance(value, dict):
            self.keys.append((value.keys, tuple(value)))
            self.items.append((value.values, tuple(value.values())))
            self.emit((type(value), len(value)), label)
            for key, held in tuple(value.items()):  # others may add to it meanwhile
                self.emit(_key(key), label)
                self.visit(held, f"{label}[{key!r}]", (value, key))
            return
        held = tuple(value)
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

    def of_class(self, kind: type, names: Iterable[str]) -> None:
        """Attributes of a class that code names, and of those before it in the order of resolution."""
        for owner in kind.__mro__:
            theirs = is_theirs(origin_of_module(owner.__module__))
            found = owner.__dict__
            if theirs and owner not in self._classes:
                self._classes.add(owner)
                self.keys.append((found.keys, tuple(found)))
                for name, value in list(found.items()):
                    ran = any(f.__code__ in self.observed.code for f in functions_of(value))
                    if ran or (name in self.attributes and not name.startswith("__")):
                        self.class_slot(owner, name, value)
            elif not theirs and owner is not nn.Module:
                for name in names:
                    if name in found and (owner, name) not in self._asked:
                        self._asked.add((owner, name))
                        self.class_slot(owner, name, found[name])

    def class_slot(self, owner: type, name: str, value: Any) -> None:
        """One attribute of a class."""
        self.classes.append((owner.__dict__, name, value))
        label = f"{owner.__name__}.{name}"
        functions = functions_of(value)
        self.emit(Same(value) if functions else None, label)
        for held in functions or [value]:
            self.visit(held, label)

    def function(self, value: FunctionType, label: str) -> None:
        """A function; if it ran, all that it may have read."""
        code = value.__code__
        if code not in self.observed.code:
            return self.emit(Same(value), label)
        self.functions.append(value)
        self._met.add(code)
        self.emit((Same(value), Same(code)), label)
        self.visit(value.__defaults__, f"the defaults of {value.__name__}")
        self.visit(value.__kwdefaults__, f"the defaults of {value.__name__}")
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            held = contents(cell)
            self.cells.append((cell, held))
            if held is MISSING:
                self.emit("absent", name)
            else:
                self.visit(held, name)
        known = value.__globals__
        builtins = known.get("__builtins__", _BUILTINS)
        if isinstance(builtins, ModuleType):  # so in a script; a dict in an imported module
            builtins = vars(builtins)
        for name in sorted(names_of(code).read):
            if name in known or name not in builtins:
                self.look(known, name, name)
        for name in sorted(names_of(code).modules):
            self.imported(name, str(known.get("__package__") or ""))
        if value.__dict__:
            self.attributes_of(value, value.__dict__, label, every=False)

    def type(self, value: type, label: str) -> None:
        """A class."""
        self.emit(Same(value), label)
        self.of_class(value, ())

    def module(self, value: ModuleType, label: str) -> None:
        """A module of Python: of those that are not libraries, the names that some code has."""
        self.emit(Same(value), label)
        if is_theirs(origin_of_module(value.__name__)):
            for name in sorted(self.attributes & value.__dict__.keys()):
                if not name.startswith("__"):
                    self.look(value.__dict__, name, f"{value.__name__}.{name}")

    def imported(self, name: str, package: str) -> None:
        """A module that a function imports, or asks for by name: as it is called, or from a package around."""
        around = package.split(".") if package else []
        for depth in range(len(around) + 1):
            full = ".".join([*around[:depth], *filter(None, [name])])
            if isinstance(found := sys.modules.get(full), ModuleType) and is_theirs(origin_of_module(full)):
                self.visit(found, full)

    def through(self, meaning: Any, parts: Iterable[Any], label: str) -> None:
        """What stands for others: they are what counts."""
        self.emit(meaning, label)
        for part in parts:
            self.visit(part, label)

    def thing(self, value: Any, label: str) -> None:
        """Any other object."""
        kind = type(value)
        if is_array(value):
            self.emit((kind, str(value.dtype), value.shape, value.tobytes()), label)
            self.arrays.append((value, value.copy()))
            return
        self.emit((Same(value), Same(kind)), label)
        if hasattr(kind, "__next__"):
            self.iterators.append(label)
        if str(kind.__module__).partition(".")[0] in _UNLOOKED:
            return
        every = self.open or not all(is_theirs(origin_of_module(k.__module__)) for k in kind.__mro__[:-1])
        if (own := attribute_dict(value)) is not None:
            self.attributes_of(value, own, label, every)
        for name in slots_of(kind):
            if (every or name in self.attributes) and (held := getattr(value, name, MISSING)) is not MISSING:
                self.emit(name, label)
                self.visit(held, f"{label}.{name}")
                self.items.append((lambda v=value, n=name: (getattr(v, n, MISSING),), (held,)))  # type: ignore[misc]
        self.of_class(kind, ())

    def attributes_of(self, value: Any, own: dict[str, Any], label: str, every: bool) -> None:
        """The attributes of an object, or those that some code names."""
        self.keys.append((own.keys, tuple(own)))
        for name in list(own):
            if every or name in self.attributes or name == "__wrapped__":
                self.emit(name, label)
                self.look(own, name, f"{label}.{name}")


_BUILTINS: dict[str, Any] = vars(sys.modules["builtins"])
_LOOKS: tuple[tuple[Any, Callable[[Walk, Any, str], None]], ...] = (
    (_CONTAINERS, Walk.container),
    (nn.Module, lambda walk, value, label: walk.emit(Same(value), label)),
    (FunctionType, Walk.function),
    # another object each time it is looked up
    (MethodType, lambda walk, value, label: walk.through("method", (value.__self__, value.__func__), label)),
    (functools.partial, lambda walk, v, label: walk.through("partial", (v.func, v.args, v.keywords), label)),
    (type, Walk.type),
    (ModuleType, Walk.module),
    (functools._lru_cache_wrapper, lambda walk, v, label: walk.through(Same(v), (v.__wrapped__,), label)),
    (weakref.ref, lambda walk, value, label: walk.through("reference", (value(),), label)),
)


def _key(value: Any) -> Any:
    return (type(value), value) if isinstance(value, (str, int, bytes, type(None))) else Same(value)
