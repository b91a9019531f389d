"""The captured steps of one model and loss: found again by what they depend on, and bounded in number."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from psg_fx.program.guard import Guard
from psg_fx.program.objects import Functions
from psg_fx.program.structure import Structure
from psg_fx.source import warn

MOST = 64
"""Captured steps that are kept; beyond, the one used least recently is forgotten."""


Key = tuple[Hashable, ...]
"""What can be compared at once of all that a captured step depends on, a part for each of KEY_PARTS."""

KEY_PARTS = (
    "what is asked of the quantities, how samples are grouped, or for how many there is to be room",
    "the modules, parameters or buffers",
    "which parameters are asked",
    "the shapes or types of the inputs, or a value among them that is no tensor",
    "autocast, or torch's defaults for new tensors",
)


@dataclass(frozen=True)
class Captured:
    """One captured step.

    number: which capture of its `PerSampleModule` it was, from 1.  batch_size: the one that it serves (None: every
    one).  most: it serves up to so many samples (None: any number).  why: it was made, against the captures before it.
    guard: whether it still stands for the program.
    """

    number: int
    batch_size: int | None
    most: int | None
    why: str
    guard: Guard = field(repr=False)
    step: Any = field(repr=False)

    def serves(self, size: int) -> bool:
        """Whether it is for batches of this size."""
        return self.batch_size in (None, size) and (self.most is None or size <= self.most)

    @property
    def graphs(self) -> Mapping[str, GraphModule]:
        """The graph after each pass, by stage name."""
        found: Mapping[str, GraphModule] = self.step.history.whole().graphs
        return found

    @property
    def compiled(self) -> int:
        """How often torch has compiled it, or a half of it, so far: for one batch size, then for others."""
        return sum(record.name == "compile" for record in self.step.history.passes)

    @property
    def seconds(self) -> float:
        """Spent in its passes, and in all that torch has compiled of it so far."""
        return float(sum(record.seconds for record in self.step.history.passes))


class Cache:
    """Captured steps by key.  Among those of one key, guards decide."""

    def __init__(self) -> None:
        self._found: collections.OrderedDict[Key, list[Captured]] = collections.OrderedDict()
        self._recent: tuple[Key, list[Captured]] | None = None
        self._made = 0
        self._told = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def entries(self) -> tuple[Captured, ...]:
        """All that are kept, in the order of capture."""
        with self._lock:
            found = [entry for entries in self._found.values() for entry in entries]
        return tuple(sorted(found, key=lambda entry: entry.number))

    def find(self, key: Key, size: int, structure: Structure, there: Functions | None = None) -> Captured | None:
        """The step that serves, or None.  structure: of the model and the loss, as it is now.  there: all functions,
        where they are looked for once for all that is asked of a call.
        """
        with self._lock:
            recent = self._recent  # whose key is compared by the identities of its parts, and no hash taken
            known = recent[1] if recent is not None and recent[0] == key else self._found.get(key, [])
            fitting = [entry for entry in known if entry.serves(size)]
            found = next((entry for entry in fitting if entry.guard.stands(structure)), None)
            if found is None:
                there = there or Functions()
                found = next((entry for entry in fitting if entry.guard.still_means(structure, there)), None)
            if found is not None:
                if found is not known[0]:
                    known.remove(found)
                    known.insert(0, found)
                if recent is None or known is not recent[1]:
                    self._found.move_to_end(key)
                    self._recent = key, known
            return found

    def knows(self, key: Key) -> bool:
        """Whether there are steps for this key, of other batch sizes or from before a change."""
        return key in self._found

    def why(self, key: Key, size: int, there: Functions) -> str:
        """Why nothing serves a call: what has changed since the most similar capture."""
        with self._lock:
            known, keys = tuple(self._found.get(key, ())), [*reversed(self._found)]
        if not keys:
            return "first call"
        if known:
            last = next((entry for entry in known if entry.serves(size)), None)
            what = "the batch size" if last is None else last.guard.changed(there) or "what the code reads"
            return f"changed: {what}"
        parts = [[a != b for a, b in zip(key, other, strict=True)] for other in keys]
        nearest = min(parts, key=sum)
        return "changed: " + "; ".join(name for name, other in zip(KEY_PARTS, nearest, strict=True) if other)

    def add(
        self, key: Key, step: Any, guard: Guard, batch_size: int | None, why: str, most: int | None = None
    ) -> Captured:  # fmt: skip
        """Keep a step."""
        with self._lock:
            self._made += 1
            entry = Captured(self._made, batch_size, most, why, guard, step)
            self._found.setdefault(key, []).insert(0, entry)
            self._found.move_to_end(key)
            self._recent = None
            while len(self) > MOST:
                oldest, self._recent = next(iter(self._found)), None
                self._found[oldest].pop()
                if not self._found[oldest]:
                    del self._found[oldest]
        return entry

    def tell(self, key: Key, size: int, there: Functions) -> None:
        """Warn, once, where something that the code reads is another at every call: each is another capture.

        size: of the batch.  Captures for other sizes do not count.
        """
        if self._told:
            return
        with self._lock:
            known = [entry for entry in self._found.get(key, ()) if entry.serves(size)]
        names = collections.Counter(name for entry in known if (name := entry.guard.changed(there)))
        name, times = next(iter(names.most_common(1)), ("", 0))
        if times < 2:
            return
        self._told = True
        warn(
            f"captured for the third time for inputs of the same shapes, because {name} has changed: the code of "
            "the model or the loss reads it, so it is part of the graph. A tensor (a buffer, or an input) may change "
            "at no cost, unless the code decides by its values"
        )
