"""No search for cyclic garbage while many objects are made that stay.

Passes and compilers make hundreds of thousands of objects, most of which live as long as a step does.  Python looks for
garbage among them again and again, and every full search walks all of torch's objects, too: of the first call of a GPT
of 24 layers that was an eighth, and a fifth where its kernels were at hand.  What is garbage waits meanwhile: 64 MB
of 900 there.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


_WAITING: list[None] = []
"""One for each that holds the search back at the moment, none where that was off before."""


@contextmanager
def without_collection() -> Iterator[None]:
    """While open, nothing looks for garbage.  (Also a decorator.)"""
    enabled = gc.isenabled()
    gc.disable()
    if enabled:
        _WAITING.append(None)
    try:
        yield
    finally:
        if enabled:
            _WAITING.pop()
            gc.enable()


def collect_while_waiting() -> None:
    """Look for garbage among what has been made since the search was held back: for whom waits for another process,
    instead of afterwards.
    """
    if _WAITING:
        gc.collect(0)


def first_without_collection(method: F) -> F:
    """A step's call, in which nothing looks for garbage as long as nothing has been captured (`_last` is None): one
    search after passes, compiler and first run in place of one after each.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._last is not None:
            return method(self, *args, **kwargs)
        with without_collection():
            return method(self, *args, **kwargs)

    return cast("F", call)
