"""Torch's remarks about itself, kept from the user while a model is captured: what the capture means is said by psg_fx.

What other threads log, and what the user's own code logs, warns of or prints, is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from psg_fx.source import TORCH


class _Dropped(logging.Filter):
    """Drops what torch logs in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or record.name.partition(".")[0] != "torch"


class _Stderr:
    """`sys.stderr` without what torch prints there in one thread.  Code that keeps it has the stream behind it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.thread = stream, threading.get_ident()
        self.active = True

    def write(self, text: str) -> int:
        """Write what was not printed by torch."""
        caller = sys._getframe(1).f_code.co_filename
        if self.active and threading.get_ident() == self.thread and caller.startswith(TORCH):
            return len(text)
        written: int = self.stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While open, torch neither logs nor prints to stderr in this thread.

    Where TORCH_LOGS asks for logs, they stay.
    """
    if os.environ.get("TORCH_LOGS") or _is_quiet():
        yield
        return
    dropped, shown = _Dropped(), _Stderr(sys.stderr)
    handlers = set(_handlers())
    for handler in handlers:
        handler.addFilter(dropped)
    sys.stderr = shown
    try:
        yield
    finally:
        shown.active = False
        while isinstance(sys.stderr, _Stderr) and not sys.stderr.active:  # another thread may have put its own on top
            sys.stderr = sys.stderr.stream
        for handler in handlers:
            handler.removeFilter(dropped)


def _is_quiet() -> bool:
    """Whether that is so already."""
    return isinstance(sys.stderr, _Stderr) and sys.stderr.active and sys.stderr.thread == threading.get_ident()


def _handlers() -> Iterator[logging.Handler]:
    """Where torch's records may arrive: its loggers have handlers of their own, or pass records on to the root.

    Not that of its trace for tools, which shows nothing: where nobody asked for one it leaves with the first record,
    and until then every record is written out for it, with the stack.
    """
    yield from logging.getLogger().handlers
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "torch" and name != "torch.__trace" and isinstance(logger, logging.Logger):
            yield from logger.handlers
