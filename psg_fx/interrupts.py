"""Signals while parts of torch are replaced: Ctrl-C comes afterwards, so that all is put back; what handlers of others
raise (a timeout by SIGALRM) comes out as it is.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised at the end; a second one at once.

    Python raises it between any two instructions of the main thread, also where a context manager has done half of what
    it undoes.
    """
    handler = _handlers([signal.SIGINT]).get(signal.SIGINT)
    if handler is None:
        yield
        return
    came: list[tuple[int, Any]] = []

    def later(number: int, frame: Any) -> None:
        if came:
            handler(number, frame)
        came.append((number, frame))

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


@contextlib.contextmanager
def raised_as_it_is() -> Iterator[None]:
    """What a handler of another signal than Ctrl-C's raises meanwhile is raised at once, and at the end in place of the
    error, or the answer, that code between has made of it.
    """
    raised: list[BaseException] = []

    def watched(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], None]:
        def handle(number: int, frame: Any) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                raised.append(error)
                raise

        return handle

    of_python = _handlers(signal.valid_signals() - {signal.SIGINT})
    for number, handler in of_python.items():
        signal.signal(number, watched(handler))
    try:
        yield
    except BaseException as error:
        if raised and error is not raised[0]:
            raise raised[0] from error
        raise
    else:
        if raised:
            raise raised[0]
    finally:
        for number, handler in of_python.items():
            signal.signal(number, handler)


def _handlers(numbers: Iterable[signal.Signals]) -> dict[signal.Signals, Callable[[int, Any], Any]]:
    """Those of Python's code; only the main thread runs them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in numbers}
    return {number: handler for number, handler in found.items() if callable(handler)}
