"""Replacing parts of torch for one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from psg_fx.interrupts import deferred

_ABSENT = object()


class _Here:
    """An attribute that some threads see as they have it, the last replacement first, and all others as it is."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.own = vars(owner).get(name, _ABSENT)
        self.theirs = getattr(owner, name) if self.own is _ABSENT else self.own
        self.mine: dict[int, list[Any]] = {}

    def choose(self) -> Any:
        """What the thread that asks sees."""
        mine = self.mine.get(threading.get_ident())
        return mine[-1] if mine else self.theirs

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        found = self.choose()
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found

    def put(self) -> None:
        """The owner has it."""
        is_module = isinstance(self.owner, ModuleType)
        setattr(self.owner, self.name, (lambda *args, **kwargs: self.choose()(*args, **kwargs)) if is_module else self)

    def take_away(self) -> None:
        """The owner is as it was."""
        if self.own is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


_HERE: dict[tuple[int, str], _Here] = {}
_LOCK = threading.Lock()


@contextlib.contextmanager
def patched_here(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """While open, `owner.name` is the replacement in this thread; other threads do not see it, whichever of them opens
    or closes its own first.

    owner: a class, or a module whose function is replaced.
    """
    key, thread = (id(owner), name), threading.get_ident()
    here = None
    try:
        with deferred(), _LOCK:
            if key not in _HERE:
                _HERE[key] = _Here(owner, name)
                _HERE[key].put()
            here = _HERE[key]
            here.mine.setdefault(thread, []).append(replacement)
        yield
    finally:
        if here is not None:
            with deferred(), _LOCK:
                here.mine[thread].pop()
                if not here.mine[thread]:
                    del here.mine[thread]
                if not here.mine:
                    here.take_away()
                    del _HERE[key]


@contextlib.contextmanager
def wrapped_here(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """While open, `owner.name` is what `made` makes of it in this thread, where this version of torch has it."""
    if not hasattr(owner, name):
        yield
        return
    with patched_here(owner, name, made(seen_here(owner, name))):
        yield


def seen_here(owner: Any, name: str) -> Any:
    """`owner.name` as this thread sees it now, for a replacement that calls it."""
    with _LOCK:
        here = _HERE.get((id(owner), name))
        return getattr(owner, name) if here is None or not isinstance(owner, ModuleType) else here.choose()


@dataclass
class _Swapped:
    """A function with other code: its own, a function like it, and what each thread runs, the last asked for last."""

    code: CodeType
    own: Callable[..., Any]
    mine: dict[int, list[Callable[..., Any]]] = field(default_factory=dict)

    def choose(self) -> Callable[..., Any]:
        """What the thread that asks runs."""
        return self.mine.get(threading.get_ident(), [self.own])[-1]


_SWAPPED: dict[str, _Swapped] = {}


def _dispatch(*args: Any, **named: Any) -> Any:
    """The code of every such function, which runs among the globals of the function's module."""
    import sys

    here = sys.modules["psg_fx.torch_private.patching"]
    return here.swapped(sys._getframe().f_code.co_name)(*args, **named)


def swapped(name: str) -> Callable[..., Any]:
    """What this thread runs of the function with other code that is known by this name."""
    with _LOCK:
        return _SWAPPED[name].choose()


@contextlib.contextmanager
def code_replaced_here(
    function: Callable[..., Any], made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """While open, calls of `function` in this thread run what `made` makes of it, whichever name they know it by
    (`from module import function`): the function stays the same object, and has other code.
    """
    assert isinstance(function, FunctionType)
    name, thread = f"{function.__module__}.{function.__qualname__}", threading.get_ident()
    found = None
    try:
        with deferred(), _LOCK:
            if name not in _SWAPPED:
                own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
                _SWAPPED[name] = _Swapped(function.__code__, own)
                function.__code__ = _dispatch.__code__.replace(co_name=name)
            found = _SWAPPED[name]
            found.mine.setdefault(thread, []).append(made(found.own))
        yield
    finally:
        if found is not None:
            with deferred(), _LOCK:
                found.mine[thread].pop()
                if not found.mine[thread]:
                    del found.mine[thread]
                if not found.mine:
                    function.__code__ = found.code
                    del _SWAPPED[name]
