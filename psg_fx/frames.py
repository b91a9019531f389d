"""Room for the frames of many calls at the bottom of a deep stack.

CPython (3.11, 3.12 and 3.13 at least) keeps the frames of a thread in chunks of 16 KB.  A call that needs one more has
it mapped by the operating system, and gives it back when it returns.  Where a loop deep inside of tracing happens to
stand at the end of a chunk, every call in it maps memory, touches and unmaps it: 7 us where a call takes 0.04, and a
sixth of all the time of a capture.  A frame that is larger than a chunk gets one of the next power of two, and what it
leaves over holds the frames of all calls inside of it.

Passes and compilers call some hundreds of functions deep, which a stack that is nearly as deep as Python allows has no
room for; and where a module calls one that it holds, a capture calls eleven functions for the four of an ordinary run.
Python allows more meanwhile: an error in the middle of tracing, where C++ calls Python, would end the process.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 140_000
"""Of 8 bytes each: a little more than half of a chunk of 2 MiB.  Memory that nobody touches is not taken."""


def with_room_for_frames(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose calls of others find memory for their frames at hand, and may be `TIMES` as deep as usual.
    Costs 10 us a call.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _deeper:
            return _large(function, *args, **kwargs)

    return call


def _large(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


_large.__code__ = _large.__code__.replace(co_stacksize=_SLOTS)


class _Deeper:
    """While open in any thread, calls may be `TIMES` as deep as usual, from the deepest of those threads on."""

    def __init__(self) -> None:
        self._lock, self._open, self._before, self._set = threading.Lock(), 0, 0, 0

    def __enter__(self) -> None:
        depth, frame = 0, sys._getframe()
        while frame.f_back is not None:
            depth, frame = depth + 1, frame.f_back
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._before = self._set = sys.getrecursionlimit()
            calls = min(TIMES * max(self._before, USUAL), MOST)
            if depth + calls > sys.getrecursionlimit():
                self._set = depth + calls
                sys.setrecursionlimit(self._set)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open and sys.getrecursionlimit() == self._set != self._before:
                sys.setrecursionlimit(self._before)


USUAL = 1000
"""As deep as Python allows at first."""

TIMES = 4
"""What runs without a capture has room in one."""

MOST = 12_000
"""Calls that go through C as those of modules do have room on a stack of 8 MiB; 20,000 have not."""

_deeper = _Deeper()
