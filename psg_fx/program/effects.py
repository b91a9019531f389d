"""What captured code changes in the Python around it: put back, and written anew after every step, or refused.

An ordinary forward that keeps a tensor or a number in an attribute (`self.last = h.detach()`) does so at every call.
The capture runs it once, on fake values.  So everything that can be reached from the model and the loss is looked at
before and after: what has changed is put back, tensors that were stored become results of the graph, and every step
stores them as the forward would.  A change that cannot be told so, such as a list that grows, is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph.facts import Entry, at, expr
from psg_fx.program.code import line_naming, names_of
from psg_fx.program.holders import Holder, Reached, drawn
from psg_fx.program.objects import MISSING
from psg_fx.program.observe import Observed, changing
from psg_fx.program.packed import is_packed

_RESULT = object()
_REPEATED = (torch.Tensor, bool, int, float, str, bytes, type(None), torch.SymInt, torch.dtype, torch.device,
             torch.Size)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """What every step leaves in the Python around it: `put(key, value)`.

    leaves: its parts, numbers as they are or by the batch size; a mark where the next result of the graph goes.
    """

    put: Callable[[Any, Any], None]
    key: Any
    label: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[None, ...]:
        """One entry for each result of the graph that it takes."""
        return tuple(None for leaf in self.leaves if leaf is _RESULT)

    def store(self, results: Iterator[torch.Tensor], batch: sympy.Symbol, size: int) -> None:
        """Leave it there after one step."""
        found = [next(results).detach() if leaf is _RESULT else _number(leaf, batch, size) for leaf in self.leaves]
        self.put(self.key, pytree.tree_unflatten(found, self.spec))


WRITTEN = Entry[tuple[Written, ...]]("values written to attributes")
"""What the program leaves in the Python around it, in the order of the outputs (set by capture)."""


def require_same_places(written: Sequence[Written], of_another_size: Sequence[Written]) -> None:
    """Refuse what is written to other places for another batch size, such as a cache with an entry for each size."""
    places = [[entry.label for entry in entries] for entries in (written, of_another_size)]
    if places[0] != places[1]:
        own, other = ([label for label in places[k] if label not in places[1 - k]] for k in (0, 1))
        raise NotYetSupported(
            "the code keeps values by the batch size", where=", ".join([*own, *other]) or "what it writes",
            why="what is kept for one size is missing for another, and a sample's own loss is that of a batch of one",
            fix="compute it at each call, or keep it by what it is made of (the length of a sequence, a device)",
        )  # fmt: skip


class Effects:
    """What the code that can be reached from the roots changes, from now on."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._reached = Reached(roots)
        self._draws = _numpy_state()

    def settle(self, observed: Observed) -> tuple[list[Written], list[torch.Tensor]]:
        """Put everything back.  Returns what every step must write, and the tensors of the capture among it.

        Raises:
            NotYetSupported: a change that a step cannot repeat.
        """
        changes = self.undo(observed)
        if not _equal(self._draws, _numpy_state()) or any(drawn(g) != state for g, state in self._reached.generators):
            raise changing("a random number of numpy's", "the model or the loss")
        written, tensors = [], []
        for holder, now in changes:
            if not holder.keyed:
                raise _refusal(holder.label, holder.name, observed)
            for key in dict.fromkeys((*holder.before, *now)):
                old, new = holder.before.get(key, MISSING), now.get(key, MISSING)
                if old is new:
                    continue
                if _kept_by_torch(holder, key, observed):
                    observed.forget(holder.owner, key)
                else:
                    entry, found = self._repeated(holder, key, new, observed)
                    written.append(entry)
                    tensors += found
        return written, tensors

    def undo(self, observed: Observed) -> list[tuple[Holder, dict[Any, Any]]]:
        """Put everything back.  Returns what had changed, and what it held."""
        changes = self._reached.changes()
        for holder, _ in changes:
            holder.write(holder.before)
        for cache, info in self._reached.caches:
            if cache.cache_info() != info:
                cache.cache_clear()
        forget_caches(observed)
        return changes

    def _repeated(self, holder: Holder, key: Any, new: Any, observed: Observed) -> tuple[Written, list[torch.Tensor]]:
        """What every step has to write, and the tensors among it."""
        label = f"{holder.label}.{key}" if isinstance(key, str) else f"{holder.label}[{key!r}]"
        leaves, spec = pytree.tree_flatten(new, is_leaf=is_packed)
        counts = _counts(holder.before.get(key), new) and observed.may_read(holder.owner, key)
        if counts or new is MISSING or not all(isinstance(v, _REPEATED) for v in leaves):
            raise _refusal(label, key if isinstance(key, str) else holder.name, observed, counts)
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        parts = tuple(_RESULT if isinstance(v, torch.Tensor) else _expression(v) for v in leaves)
        return Written(holder.put, key, label, spec, parts), tensors


def _refusal(label: str, name: str, observed: Observed, counts: bool = False) -> NotYetSupported:
    return NotYetSupported(
        f"the code changes {label}", where=line_naming(iter(observed.code), name) or label,
        why="it reads the number that it changes, so every call would need another graph" if counts
        else "a graph runs no Python, so this would happen once, while the model is captured",
        fix="make it a buffer (torch.zeros(()), then add_), which every step writes" if counts
        else "return the value from the model, keep it in an attribute as a tensor, or leave the line out",
    )  # fmt: skip


def _kept_by_torch(holder: Holder, key: Any, observed: Observed) -> bool:
    """Whether a layer of torch's writes an attribute for itself, as recurrent layers list their weights.

    Such a layer looks whether its list still holds, so it is neither an effect nor a value that is read.
    """
    if holder.owner is None or not any(k.__module__.startswith("torch.nn") for k in type(holder.owner).__mro__[:-2]):
        return False
    return not any(key in names_of(code).attributes for code in observed.code)


def _counts(old: Any, new: Any) -> bool:
    """Whether a number becomes another one."""
    return type(old) in (int, float) and type(new) in (int, float)


def _expression(value: Any) -> Any:
    return expr(value) if isinstance(value, torch.SymInt) else value


def _number(leaf: Any, batch: sympy.Symbol, size: int) -> Any:
    return at(leaf, batch, size) if isinstance(leaf, sympy.Expr) else leaf


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


def _equal(before: Any, now: Any) -> bool:
    return before is None or now is None or (before[2:] == now[2:] and bool((before[1] == now[1]).all()))


def forget_caches(observed: Observed) -> None:
    """Empty the caches (`functools.lru_cache`) of functions that ran, those of packages, too, where what can be reached
    is not followed: what they hold now is of the capture.
    """
    for code in observed.code:
        found = observed.named(code)
        if isinstance(found, functools._lru_cache_wrapper):
            found.cache_clear()
