"""Long work shows itself: one line on a terminal, gone when the work is done."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def is_watched() -> bool:
    """Whether stderr is a terminal: not what scripts put in its place, and no closed stream."""
    stream: Any = sys.stderr
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class Progress:
    """A line on stderr that says what is being done.  Nothing where `shown` is False or stderr is not a terminal."""

    def __init__(self, shown: bool = False) -> None:
        self.shown = shown

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show `what` until the block ends."""
        self.say(what)
        try:
            yield
        finally:
            self.say("")

    def say(self, what: str) -> None:
        """Show `what` in place of what was shown; nothing for an empty text."""
        if self.shown and is_watched():
            sys.stderr.write(f"\r\033[K{'psg_fx: ' * bool(what)}{what[:100]}")
            sys.stderr.flush()
