"""Results in memory of their own: compiled code may return a part of what it was given, such as x for x · 1."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from psg_fx.tensors import storage_of


class OwnMemory:
    """Which results of one code lie in its arguments is the same at every call, and looked at once."""

    __slots__ = ("_seen", "_shared")

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._shared: set[int] = set()

    def of(self, results: Sequence[Any], arguments: Sequence[Any], code: Hashable = None) -> Sequence[Any]:
        """The results, which are the caller's to write into and to keep; copies of those that lie in arguments.  code:
        what says which code has run, where there are several.
        """
        if code not in self._seen:
            given, found = list(map(storage_of, arguments)), list(map(storage_of, results))
            self._shared.update(i for i, place in enumerate(found) if place is not None and place in given)
            if None not in (*given, *found):  # at a level of torch.func nothing is seen
                self._seen.add(code)
        if not self._shared:
            return results
        return [value.clone() if i in self._shared else value for i, value in enumerate(results)]
