"""Replacing parts of torch for one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

_ABSENT = object()


class _Here:
    """An attribute that one thread sees as `mine`, and all others as `theirs`."""

    def __init__(self, mine: Any, theirs: Any) -> None:
        self.thread, self.mine, self.theirs = threading.get_ident(), mine, theirs

    def choose(self) -> Any:
        """What the thread that asks sees."""
        return self.mine if threading.get_ident() == self.thread else self.theirs

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        found = self.choose()
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.choose()(*args, **kwargs)


@contextlib.contextmanager
def patched_here(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """While open, `owner.name` is the replacement in this thread; other threads do not see it.

    owner: a class, or a module whose function is replaced.
    """
    own = vars(owner).get(name, _ABSENT)
    here = _Here(replacement, getattr(owner, name) if own is _ABSENT else own)
    setattr(owner, name, (lambda *args, **kwargs: here(*args, **kwargs)) if isinstance(owner, ModuleType) else here)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


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
_LOCK = threading.Lock()


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
    with _LOCK:
        if name not in _SWAPPED:
            own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
            _SWAPPED[name] = _Swapped(function.__code__, own)
            function.__code__ = _dispatch.__code__.replace(co_name=name)
        found = _SWAPPED[name]
        found.mine.setdefault(thread, []).append(made(found.own))
    try:
        yield
    finally:
        with _LOCK:
            found.mine[thread].pop()
            if not found.mine[thread]:
                del found.mine[thread]
            if not found.mine:
                function.__code__ = found.code
                del _SWAPPED[name]
