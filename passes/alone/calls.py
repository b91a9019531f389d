"""What each call of torch gives while the code runs, so that two runs of it may be told apart whatever a mask hides.

A batch of one is another program where a squeeze takes its dim, or `contiguous` copies nothing.  `AsOfSeveral` watches
these calls while the code runs on two samples, and has them do the same while it runs on one.
"""

from __future__ import annotations

import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from psg_fx.program.code import users_line
from psg_fx.source import is_library
from psg_fx.tensors import storage_of
from psg_fx.torch_private.modes import is_transformed, no_modes
from psg_fx.torch_private.ops import MAY_COPY

from .arguments import Arguments, Same, arguments_of, differ_at_random, other_numbers
from .memory import Memory

Key = tuple[str, str]
"""Where a call stands, and its name."""

_OURS = ("psg_fx.passes.capture", "psg_fx.ops")
_SQUEEZES = ("squeeze", "squeeze_")


@dataclass(frozen=True)
class Given:
    """What a call gives, as it was then, and what it is given.  is_view: of that, and nothing else."""

    tensors: tuple[Tensor, ...]
    is_view: bool
    arguments: Arguments | None


class Calls(TorchFunctionMode):
    """While open, what calls of torch give is noted, where the user's code or a layer of torch stands."""

    def __init__(self) -> None:
        super().__init__()
        self.given: defaultdict[Key, list[Given]] = defaultdict(list)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, frame = _name(func), sys._getframe(1)
        if "empty" in name or _is_ours(frame):  # empty memory holds anything
            return func(*args, **(kwargs or {}))
        with no_modes():
            arguments = arguments_of(func, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        if tensors := tuple(_plain(found)):
            given = {storage_of(t) for t in _plain((args, kwargs))}
            mine = {id(t) for t in pytree.tree_leaves((args, kwargs))}
            is_view = all(storage_of(t) in given and id(t) not in mine for t in tensors)
            with no_modes():
                noted = Given(tuple(t.detach().clone() for t in tensors), is_view, arguments)
            self.given[users_line(frame), name].append(noted)
        return found

    def other_than(self, alone: Calls, same: Same, longer: bool = False) -> str | None:
        """The line and name of a call that gives something else there, or stands in one of both only; None if there is
        none.  longer: calls may stand here more often, as in a loop over a padding.
        """
        for key in dict.fromkeys((*self.given, *alone.given)):
            here, there = self.given[key], alone.given[key]
            rest = (*(() if longer else here[len(there) :]), *there[len(here) :])
            pairs = zip(here, there, strict=False)
            if any(not given.is_view for given in rest) or any(_differ(a, b, key, same, longer) for a, b in pairs):
                return f"{key[1]} ({key[0]})"
        return None


def _differ(here: Given, there: Given, key: Key, same: Same, longer: bool) -> bool:
    """Whether two calls do something else."""
    if len(here.tensors) != len(there.tensors) or not all(map(same, here.tensors, there.tensors)):
        return True
    if here.is_view or key[1] in MAY_COPY or here.arguments is None or there.arguments is None:
        return False
    if not longer and other_numbers(here.arguments, there.arguments):
        return True
    return differ_at_random(here.arguments, there.arguments, same, here.tensors[0].device)


class AsOfSeveral(TorchFunctionMode):
    """While open for the first time, on two samples, it is noted which dims a squeeze takes and what is copied; while
    open again, on one, the same is done.  memory: of that run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self._seen: defaultdict[Key, list[tuple[tuple[int, ...], bool]]] = defaultdict(list)
        self._again: dict[Key, Iterator[tuple[tuple[int, ...], bool]]] | None = None

    def again(self) -> AsOfSeveral:
        """The mode, for a run on one sample."""
        self._again = {key: iter(seen) for key, seen in self._seen.items()}
        return self

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        if name not in (*_SQUEEZES, *MAY_COPY) or not (args and isinstance(x := args[0], Tensor)):
            return func(*args, **(kwargs or {}))
        before = x.shape
        found = func(*args, **(kwargs or {}))
        key = (users_line(sys._getframe(1)), name)
        if self._again is None:
            self._seen[key].append((_taken(before, found.shape), storage_of(found) != storage_of(x)))
            return found
        taken, copies = next(self._again.get(key, iter(())), ((), True))
        if name in _SQUEEZES:
            return found.reshape([n for d, n in enumerate(before) if d not in taken])
        if not copies or storage_of(found) != storage_of(x):
            return found
        return found.clone() if is_transformed(x) else self.memory.copied(found)


def _taken(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """The dims of size 1 that a squeeze has taken, of which all others are kept."""
    kept = list(after)
    return tuple(d for d, n in enumerate(before) if not (kept[:1] == [n] and (kept.pop(0) or True)))


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _plain(values: Any) -> Iterator[Tensor]:
    """The tensors that hold numbers of their own."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor) and value.layout is torch.strided and not is_transformed(value):
            yield value


def _is_ours(frame: FrameType) -> bool:
    """Whether a call is of a function that is written otherwise here, such as the loop of a recurrent layer."""
    for each, _ in traceback.walk_stack(frame):
        if not is_library(each.f_code.co_filename):
            return False
        if each.f_globals.get("__name__", "").startswith(_OURS):
            return True
    return False


__all__ = ["AsOfSeveral", "Calls"]
