"""Replacing parts of torch for one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import ModuleType
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
