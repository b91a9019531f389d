"""Ctrl-C while parts of torch are replaced: it comes afterwards, so that all is put back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised at the end; a second one at once.

    Python raises it between any two instructions of the main thread, also where a context manager has done half of what
    it undoes.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
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
