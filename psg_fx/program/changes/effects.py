"""What captured code changes in the Python around it: put back, and written anew after every step, or refused.

An ordinary forward that keeps a tensor or a number in an attribute (`self.last = h.detach()`) does so at every call.
The capture runs it once, on fake values.  So everything that can be reached from the model and the loss is looked at
before and after: what has changed is put back, tensors that were stored become results of the graph, and every step
stores them as the forward would.  A change that cannot be told so, such as a list that grows, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.program.changes.counters import NumberRead, is_counter, stand_in
from psg_fx.program.changes.holders import Holder
from psg_fx.program.changes.reached import Reached, drawn
from psg_fx.program.changes.set_up import SetUp, set_up
from psg_fx.program.changes.written import Written, tensors_in, written_anew
from psg_fx.program.code import line_naming, names_of
from psg_fx.program.made_objects import opened
from psg_fx.program.objects import MISSING, put_into_cache, take_tensors_from_cache
from psg_fx.program.reads.asked import changing
from psg_fx.program.reads.observed import Observed


@dataclass(frozen=True)
class Change:
    """What the code has changed in the Python around it.  counts: it is a number, and may be read."""

    holder: Holder
    key: Any
    now: Any
    counts: bool

    @property
    def by_size(self) -> bool:
        """Whether it is a number that follows the sizes of the call."""
        return isinstance(self.now, torch.SymInt)

    @property
    def label(self) -> str:
        return f"{self.holder.label}.{self.key}" if isinstance(self.key, str) else f"{self.holder.label}[{self.key!r}]"

    @property
    def name(self) -> str:
        """What a line that changes it says."""
        return self.key if isinstance(self.key, str) else self.holder.name


class Unsettled(NotYetSupported):
    """The code reads numbers that it changes: it may count, or know the numbers after its first run."""

    def as_known(self) -> NotYetSupported:
        """The error as users know it."""
        return NotYetSupported(self.what, where=self.where, why=self.why, fix=self.fix)


@contextlib.contextmanager
def made(changes: Sequence[Change]) -> Iterator[None]:
    """What the code has changed is as it left it, for a while; tensors have the same sizes."""
    for change in changes:
        change.holder.put(change.key, pytree.tree_map(_alike, change.now))
    try:
        yield
    finally:
        for change in changes:
            change.holder.write(change.holder.before)


def _alike(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint if value.node.has_hint() else 0
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(list(map(int, value.shape)), dtype=value.dtype, device=value.device)


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
    """What the code that can be reached from the roots changes, from now on.

    settled: labels of numbers that the code reads, and changes once: there is a graph for each of their values.
    counted: labels of those that it may only count on with, which is tried.
    without_tensors: caches of functions have no tensors for a while, which some batch sizes would find, others not.
    changes: what it has changed.  set_up: of that, what it has changed for good.  made: the first parameter, or module
    with tensors, that it has made.  replaced: the first that it has put in the place of another, or taken off.
    """

    def __init__(
        self, roots: Sequence[Any], settled: Container[str] = (), counted: frozenset[str] = frozenset(),
        without_tensors: bool = False,
    ) -> None:  # fmt: skip
        self._reached = Reached(roots)
        self._reads: list[str] = []
        self._counters = [(h, stand_in(h, counted, self._reads)) for h in self._reached.holders if counted]
        caches = [cache for cache, _, _ in self._reached.caches] if without_tensors else []
        self._taken = [(cache, take_tensors_from_cache(cache)) for cache in caches]
        self._settled = settled
        self.changes: list[Change] = []
        self.set_up = SetUp()
        self.made = self.replaced = ""
        self._draws = _numpy_state()

    def settle(self, observed: Observed, symbols: Collection[str]) -> tuple[list[Written], list[torch.Tensor]]:
        """Put everything back.  Returns what every step must write, and the tensors of the capture among it.

        symbols: the names of the sizes that have no number yet.  What is new under a key that names one (what a library
        has found out for these shapes) is of this capture alone.

        Raises:
            NotYetSupported: a change that a step cannot repeat.
            Unsettled: numbers that the code reads, and changes.
        """
        changes = self.undo(observed)
        if self.made:
            raise _as_it_runs("makes", self.made, observed, "make it in __init__, or call the model once before the "
                              "first call of the step")  # fmt: skip
        if self.replaced:
            raise _as_it_runs("replaces", self.replaced, observed, "choose between them by a local variable, or write "
                              "values under torch.no_grad() after the step")  # fmt: skip
        self.set_up = set_up(changes, observed)
        if not _equal(self._draws, _numpy_state()) or any(drawn(g) != state for g, state in self._reached.generators):
            line = line_naming(iter(observed.code), "random")
            raise changing("a random number of numpy's", line or "the model or the loss")
        written, tensors = [], []
        for holder, now in changes:
            if not isinstance(now, dict):
                if self.set_up.keeps(holder):
                    continue
                raise _refusal(holder.label, holder.name, observed)
            for key in dict.fromkeys((*holder.before, *now)):
                old, new = holder.before.get(key, MISSING), now.get(key, MISSING)
                if is_counter(new) and new.is_as_before():
                    continue
                if old is new or self.set_up.keeps(holder, key) or (old is MISSING and _names_any(key, symbols)):
                    continue
                if not isinstance(new, torch.Tensor) and _kept_by_torch(holder, key, observed):
                    observed.forget(holder.owner, key)
                    continue
                known = getattr(holder.kind, key, MISSING) if old is MISSING and isinstance(key, str) else old
                counts = _counts(known, new) and observed.may_read(holder.owner, key)
                self.changes.append(Change(holder, key, opened(new), counts))
                written.append(_repeated(self.changes[-1], observed))
                tensors += tensors_in(self.changes[-1].now)
        self._forget_counters(observed)
        for change in self.changes:
            if change.counts and change.label not in self._settled:
                raise _unsettled(change, observed)
        return written, tensors

    def _forget_counters(self, observed: Observed) -> None:
        if self._reads:
            raise NumberRead(self._reads[0])
        observed.counted = [
            (vars(holder.owner), name, f"{holder.label}.{name}") for holder, names in self._counters for name in names
        ]
        for holder, names in self._counters:
            for name in names:
                observed.forget(holder.owner, name)

    def undo(self, observed: Observed) -> list[tuple[Holder, Any]]:
        """Put everything back.  Returns what had changed, and what it held."""
        answered = [cache for cache, info, _ in self._reached.caches if cache.cache_info().hits != info.hits]
        self.made = self._reached.take_out()
        self.replaced = self._reached.put_members_back()
        changes = self._reached.put_back()
        for cache in answered:  # what it gave was computed before, and may be computed anew
            observed.answered(cache.__wrapped__)
        for cache, taken in self._taken:
            put_into_cache(cache, taken)
        forget_caches(observed, [cache for cache, _, _ in self._reached.caches])
        return changes


@contextlib.contextmanager
def nothing_left(roots: Sequence[Any]) -> Iterator[None]:
    """What code changes in the Python that can be reached, and in tensors that lie there, is put back afterwards."""
    reached = Reached(roots, with_tensors=True)
    copies = [(t, t._version, t.detach().clone()) for t in reached.tensors if _is_copied(t)]
    try:
        yield
    finally:
        reached.put_back()
        for tensor, version, copy in copies:
            if tensor._version != version:
                tensor.detach().copy_(copy)


_MOST_COPIED = 1 << 20
"""Elements of a tensor that is copied to be put back."""


def _is_copied(tensor: torch.Tensor) -> bool:
    ordinary = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_inference()
    return ordinary and tensor.numel() <= _MOST_COPIED


def _names_any(key: Any, symbols: Collection[str]) -> bool:
    """Whether a key is a text that names a symbol, or has one."""
    texts = [part for part in pytree.tree_leaves(key) if isinstance(part, str)]
    return any(word in symbols for text in texts for word in re.findall(r"[a-z]\d+", text))


def _repeated(change: Change, observed: Observed) -> Written:
    """What every step has to write."""
    entry = written_anew(change.holder, change.key, change.label, change.now)
    if entry is None:
        raise _refusal(change.label, change.name, observed)
    return entry


def _as_it_runs(does: str, member: str, observed: Observed, fix: str) -> NotYetSupported:
    """The refusal of a change of the model's parameters and modules."""
    return NotYetSupported(
        f"the code {does} {member} as it runs", where=_line(member, member.rpartition(".")[2], observed),
        why="a step has the parameters and modules that are there when it is captured", fix=fix,
    )  # fmt: skip


def _unsettled(change: Change, observed: Observed) -> Unsettled:
    return Unsettled(
        f"the code changes {change.label}", where=_line(change.label, change.name, observed),
        why="it reads the number that it changes, so every call would need another graph",
        fix="make it a buffer (torch.zeros(()), then add_), which every step writes",
    )  # fmt: skip


def _refusal(label: str, name: str, observed: Observed) -> NotYetSupported:
    return NotYetSupported(
        f"the code changes {label}", where=_line(label, name, observed),
        why="a graph runs no Python, so this would happen once, while the model is captured",
        fix="return the value from the model, keep it in an attribute as a tensor, or leave the line out",
    )  # fmt: skip


def _line(label: str, name: str, observed: Observed) -> str:
    return line_naming(iter(observed.code), name) or label


def _kept_by_torch(holder: Holder, key: Any, observed: Observed) -> bool:
    """Whether a layer of torch's writes an attribute for itself, as recurrent layers list their weights.

    Such a layer looks whether its list still holds, so it is neither an effect nor a value that is read.
    """
    if key == "training":
        return False
    if holder.owner is None or not any(k.__module__.startswith("torch.nn") for k in type(holder.owner).__mro__[:-2]):
        return False
    return not any(key in names_of(code).attributes for code in observed.code)


def _counts(old: Any, new: Any) -> bool:
    """Whether a number becomes another one."""
    return type(old) in (int, float) and type(new) in (int, float, torch.SymInt)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


def _equal(before: Any, now: Any) -> bool:
    return before is None or now is None or (before[2:] == now[2:] and bool((before[1] == now[1]).all()))


def forget_caches(observed: Observed, known: Sequence[Any]) -> None:
    """Empty the caches (`functools.lru_cache`) of functions that ran, but known ones: those of packages, where what can
    be reached is not followed.  What they hold now is of the capture.
    """
    for code in observed.code:
        found = observed.named(code) if code not in observed.cached else None
        if isinstance(found, functools._lru_cache_wrapper) and not any(found is each for each in known):
            found.cache_clear()
