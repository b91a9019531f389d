"""What is noted on a walk over values, and what code may read: functions, classes and modules of Python (`walk`)."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from psg_fx.program.code import Origin, is_theirs, names_of, origin_of, origin_of_code, origin_of_module
from psg_fx.program.decisions.questions import Question
from psg_fx.program.objects import MISSING, contents, functions_of
from psg_fx.program.reads.observed import Observed
from psg_fx.program.values import Same

Place = tuple[dict[Any, Any], Any]
_LONG = 100
"""Characters of a label: of a longer one the middle is left out."""


class CodeWalk:
    """What the code could read, as it is now.

    meaning, labels: one entry for each value met, and how a user would write it.
    slots, classes: `(dict, key, value)` that were looked up, of objects and of classes.
    keys, items: what to iterate, and what that gave: names, and things.
    kinds: objects, and their classes.
    tensors: those met, and the dict in which they lie, if they lie in one.
    containers: lists, dicts and the like, which others that hold the same may replace.
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
        self.looked: list[tuple[torch.Tensor, Question]] = []
        self.tensors: list[tuple[torch.Tensor, Place | None]] = []
        self.containers: list[Any] = []
        self.hookless: list[dict[str, Any]] = []
        self.kinds: list[tuple[Any, type]] = []
        self.iterators: list[str] = []
        self._left: collections.deque[tuple[Any, str, Place | None]] = collections.deque()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._order: dict[int, int] = {}
        self._met: set[CodeType] = set()
        self._classes: set[type] = set()
        self._asked: set[tuple[type, str]] = set()

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
        """One value, and what it holds, in its turn: chains of objects may be longer than Python's stack."""
        short = label if len(label) <= _LONG else f"{label[: _LONG // 2]}..{label[-_LONG // 4 :]}"
        self._left.append((value, short, place))

    def all_left(self) -> None:
        """Visit what is left, in order."""
        while self._left:
            self.one(*self._left.popleft())

    def one(self, value: Any, label: str, place: Place | None) -> None:
        """One value; what it holds is visited later."""
        raise NotImplementedError

    def attributes_of(self, own: dict[str, Any], label: str, every: bool) -> None:
        """The attributes of an object, or those that some code names."""
        raise NotImplementedError

    def of_class(self, kind: type, names: Iterable[str]) -> None:
        """Attributes of a class that code names, and of those before it in the order of resolution."""
        for owner in kind.__mro__:
            theirs = is_theirs(origin_of_module(owner.__module__))
            found = owner.__dict__
            if theirs and owner not in self._classes:
                self._classes.add(owner)
                self.keys.append((found.keys, tuple(found)))
                self.emit(tuple(n for n, v in found.items() if n[:2] != "__" or functions_of(v)), owner.__name__)
                for name, value in list(found.items()):
                    ran = any(f.__code__ in self.observed.code for f in functions_of(value))
                    named = name in self.attributes or (self.open and _is_plain(value))
                    if ran or (named and name not in _OF_PYTHON):
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
        functions: list[Any] = functions_of(value)
        self.emit(Same(value) if functions else None, label)
        if not functions and isinstance(value, (staticmethod, classmethod)):
            functions = [value.__func__]  # a cache, say
        for held in functions or [value]:
            self.visit(held, label)

    def function(self, value: FunctionType, label: str) -> None:
        """A function; if it ran, all that it may have read."""
        code = value.__code__
        if code not in self.observed.code:
            self.emit(Same(value), label)
            return self.of_function(value, label)
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
        names = names_of(code)
        read = set(names.read)
        if names.attributes & _OF_GLOBALS:  # by names that the code makes
            read |= {name for name, held in known.items() if _is_plain(held) and name not in _OF_PYTHON}
        for name in sorted(read):
            if name in known or name not in builtins:
                self.look(known, name, name)
            else:  # a global of this name would come before it
                self.slots.append((known, name, MISSING))
                self.emit("absent", name)
                if name not in _PYTHONS:
                    self.look(builtins, name, name)
        its_own = "modules" in names.attributes and "__name__" in names.read & set(known)  # sys.modules[__name__]
        for name in sorted(names.modules.union({str(known["__name__"])} if its_own else ())):
            self.imported(name, str(known.get("__package__") or ""))
        self.of_function(value, label)

    def of_function(self, value: FunctionType, label: str) -> None:
        """What a function has as an object, which may be a namespace."""
        if not is_theirs(origin_of_code(value.__code__, value.__globals__)):
            return
        if value.__dict__ or self.attributes & ASKING:
            self.attributes_of(value.__dict__, label, every=self.open)
        for name in sorted(self.attributes & _OF_FUNCTIONS):
            held = getattr(value, name)
            self.items.append((lambda n=name: (getattr(value, n),), (held,)))  # type: ignore[misc]
            self.visit(held, f"{label}.{name}")

    def type(self, value: type, label: str) -> None:
        """A class."""
        self.emit(Same(value), label)
        self.of_class(value, ())
        self.of_class(type(value), ())

    def module(self, value: ModuleType, label: str) -> None:
        """A module of Python: of those that are not libraries, the names that some code has."""
        self.emit(Same(value), label)
        owner = origin_of(value)
        if is_theirs(owner):
            names = self.attributes & value.__dict__.keys()
            if self.open and owner is Origin.USER:  # by names that the code makes
                names |= {name for name, held in value.__dict__.items() if _is_plain(held)}
            for name in sorted(names):
                if name not in _OF_PYTHON:
                    self.look(value.__dict__, name, f"{value.__name__}.{name}")

    def imported(self, name: str, package: str) -> None:
        """A module that a function imports, or asks for by name: as it is called, or from a package around."""
        around = package.split(".") if package else []
        for depth in range(len(around) + 1):
            full = ".".join([*around[:depth], *filter(None, [name])])
            if isinstance(found := sys.modules.get(full), ModuleType) and is_theirs(origin_of_module(full)):
                self.visit(found, full)


def _is_plain(value: Any) -> bool:
    """Whether a value is one that code computes with, rather than code."""
    return not isinstance(value, (FunctionType, type, ModuleType)) and not functions_of(value)


ASKING = frozenset({"getattr", "hasattr", "vars", "__dict__"})
"""What asks for attributes that may not be there."""
_OF_FUNCTIONS = frozenset({"__doc__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__"})
"""What every function has that code may ask for."""
_OF_GLOBALS = frozenset({"globals", "eval", "exec"})
_OF_PYTHON = frozenset({
    *vars(ModuleType("")), *vars(type("", (), {})), *dir(object), *dir(type), "__builtins__", "__file__", "__cached__",
    "__path__", "__annotations__", "__all__", "__slots__", "__dataclass_params__", "__match_args__", "__orig_bases__",
    "__parameters__", "__static_attributes__", "__firstlineno__", "__getattr__", "__dir__", "__getstate__",
    "__post_init__", "__slotnames__", "__abstractmethods__", "_abc_impl",
})  # fmt: skip
"""Names that Python has for something of its own in modules and classes."""
_BUILTINS: dict[str, Any] = vars(sys.modules["builtins"])
_PYTHONS = frozenset(_BUILTINS)
