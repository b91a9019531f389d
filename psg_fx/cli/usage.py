"""Wrong usage of the command line."""

from __future__ import annotations

import traceback
from pathlib import Path

from psg_fx.errors import first_line
from psg_fx.source import is_library


class UsageError(Exception):
    """Something on the command line does not mean anything.  Its text is one line."""


def raised(error: BaseException) -> str:
    """`raised ValueError: no data (models.py:12)`: an exception in the user's code, and the last line of it there."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        where = f" ({Path(error.filename or '').name}:{error.lineno})"
        return f"raised SyntaxError: {error.msg}{where}"
    said = first_line(error)[:200]
    return f"raised {type(error).__name__}{f': {said}' if said else ''}{where}"
