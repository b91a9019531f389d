"""Replacing parts of torch for one thread."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from psg_fx.interrupts import deferred

_ABSENT = object()


class _Choices:
    """What some threads see of something in place of the original: of each, the last replacement first."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.mine: dict[int, list[Any]] = {}

    def choose(self) -> Any:
        """What the thread that asks sees."""
        mine = self.mine.get(threading.get_ident())
        return mine[-1] if mine else self.theirs

    def put(self) -> None:
        """From here on threads see what is chosen."""
        raise NotImplementedError

    def take_away(self) -> None:
        """All is as it was."""
        raise NotImplementedError


class _Attribute(_Choices):
    """An attribute of a class, or of a module."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.own = vars(owner).get(name, _ABSENT)
        super().__init__(inspect.getattr_static(owner, name) if self.own is _ABSENT else self.own)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        found = self.choose()
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found

    def put(self) -> None:
        is_module = isinstance(self.owner, ModuleType)
        setattr(self.owner, self.name, (lambda *args, **kwargs: self.choose()(*args, **kwargs)) if is_module else self)

    def take_away(self) -> None:
        if self.own is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


class _Code(_Choices):
    """The code of a function."""

    def __init__(self, function: FunctionType) -> None:
        self.function, self.code = function, function.__code__
        super().__init__(as_it_is(function))

    def put(self) -> None:
        own = self.code.co_freevars  # as many as its closure has
        self.function.__code__ = _dispatch.__code__.replace(co_name=_known_as(self.function), co_freevars=own)

    def take_away(self) -> None:
        self.function.__code__ = self.code


_CHOICES: dict[Hashable, _Choices] = {}
_LOCK = threading.Lock()


@contextlib.contextmanager
def _replaced(key: Hashable, made: Callable[[], _Choices], replacement: Callable[[_Choices], Any]) -> Iterator[None]:
    """While open, this thread sees the replacement; other threads do not, whichever of them opens or closes its own
    first.  made: the choices of this key, where no thread has a replacement.
    """
    thread, choices = threading.get_ident(), None
    try:
        with deferred(), _LOCK:
            if key not in _CHOICES:
                found = made()
                found.put()
                _CHOICES[key] = found
            choices = _CHOICES[key]
            choices.mine.setdefault(thread, []).append(replacement(choices))
        yield
    finally:
        if choices is not None:
            with deferred(), _LOCK:
                choices.mine[thread].pop()
                if not choices.mine[thread]:
                    del choices.mine[thread]
                if not choices.mine:
                    choices.take_away()
                    del _CHOICES[key]


def patched_here(owner: Any, name: str, replacement: Any) -> contextlib.AbstractContextManager[None]:
    """While open, `owner.name` is the replacement in this thread.

    owner: a class, or a module whose function is replaced.
    """
    return _replaced((id(owner), name), lambda: _Attribute(owner, name), lambda choices: replacement)


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
        found = _CHOICES.get((id(owner), name))
        return getattr(owner, name) if found is None or not isinstance(owner, ModuleType) else found.choose()


def code_replaced_here(
    function: Callable[..., Any], made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> contextlib.AbstractContextManager[None]:
    """While open, calls of `function` in this thread run what `made` makes of it, whichever name they know it by
    (`from module import function`): the function stays the same object, and has other code.
    """
    assert isinstance(function, FunctionType)
    return _replaced(_known_as(function), lambda: _Code(function), lambda choices: made(choices.theirs))


def as_it_is(function: FunctionType) -> FunctionType:
    """A copy that keeps the function's code while that is replaced."""
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def _known_as(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _dispatch(*args: Any, **named: Any) -> Any:
    """The code of every function with other code, which runs among the globals of the function's module."""
    import sys

    here = sys.modules["psg_fx.torch_private.patching"]
    return here.swapped(sys._getframe().f_code.co_name)(*args, **named)


def swapped(name: str) -> Callable[..., Any]:
    """What this thread runs of the function with other code that is known by this name."""
    with _LOCK:
        chosen: Callable[..., Any] = _CHOICES[name].choose()
    return chosen
