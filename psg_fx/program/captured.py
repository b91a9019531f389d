"""The captured steps of one model and loss: found again by what they depend on, and bounded in number."""

from __future__ import annotations

import collections
import threading
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from psg_fx.program.guard import Guard

MOST = 64
"""Captured steps that are kept; beyond, the one used least recently is forgotten."""


@dataclass(frozen=True)
class Captured:
    """One compiled step, whether it still stands for the program, and the batch size it is for (None: for all)."""

    step: Any
    guard: Guard
    size: int | None


class Cache:
    """Captured steps by key: what can be compared at once.  Among those of one key, guards decide."""

    def __init__(self) -> None:
        self._found: collections.OrderedDict[Hashable, list[Captured]] = collections.OrderedDict()
        self._told = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def find(self, key: Hashable, size: int) -> Captured | None:
        """The step that serves, or None."""
        with self._lock:
            known = self._found.get(key, [])
            for place, entry in enumerate(known):
                if entry.size in (None, size) and entry.guard.holds():
                    if place:
                        known.insert(0, known.pop(place))
                    self._found.move_to_end(key)
                    return entry
        return None

    def knows(self, key: Hashable) -> bool:
        """Whether there are steps for this key, of other batch sizes or from before a change."""
        return key in self._found

    def add(self, key: Hashable, entry: Captured) -> Captured:
        """Keep a step."""
        with self._lock:
            self._found.setdefault(key, []).insert(0, entry)
            self._found.move_to_end(key)
            while len(self) > MOST:
                oldest = next(iter(self._found))
                self._found[oldest].pop()
                if not self._found[oldest]:
                    del self._found[oldest]
        return entry

    def tell(self, key: Hashable) -> None:
        """Warn, once, where something that the code reads is another at every call: each is another capture."""
        known = self._found.get(key, ())
        changed = [name for entry in known if (name := entry.guard.changed())]
        if len(changed) < 2 or self._told:
            return
        self._told = True
        warnings.warn(
            f"captured for the third time for inputs of the same shapes, because {changed[0]} has changed: the code of "
            "the model or the loss reads it, so it is part of the graph. A tensor (a buffer, or an input) may change "
            "at no cost",
            stacklevel=7,
        )
