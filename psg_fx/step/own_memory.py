"""Results in memory of their own: compiled code may return a part of what it was given, such as x for x · 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psg_fx.tensors import storage_of


class OwnMemory:
    """Which results of compiled code lie in its arguments is the same at every call, and looked at once for each batch
    size, since there is code for one and code for several.
    """

    __slots__ = ("_seen", "_shared")

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._shared: set[int] = set()

    def of(self, results: Sequence[Any], arguments: Sequence[Any], size: int) -> Sequence[Any]:
        """The results, which are the caller's to write into and to keep; copies of those that lie in arguments."""
        if size not in self._seen:
            given, found = list(map(storage_of, arguments)), list(map(storage_of, results))
            self._shared.update(i for i, place in enumerate(found) if place is not None and place in given)
            if None not in (*given, *found):  # at a level of torch.func nothing is seen
                self._seen.add(size)
        if not self._shared:
            return results
        return [value.clone() if i in self._shared else value for i, value in enumerate(results)]
