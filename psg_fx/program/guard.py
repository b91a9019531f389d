"""Does a captured graph still stand for the program?  Asked at every call, so in one step for each kind of place.

First by identity: the same objects lie in the places that the last walk noted, and tensors have the same descriptions.
Where that fails, another walk tells whether the meaning has changed.  If not (a list was replaced by an equal one),
its places are those to ask next time.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Sequence, Sized
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from psg_fx.errors import NotYetSupported
from psg_fx.program.objects import MISSING, Functions, contents
from psg_fx.program.reads.observed import Observed
from psg_fx.program.reads.walk import HOOKS, Walk
from psg_fx.program.structure import Absent, Slots, Structure, Tensors
from psg_fx.tensors import place_of

_CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_HOOKS = operator.itemgetter(*HOOKS)


class Guard:
    """Whether what the code of a program reads is what it was when the program was captured.

    structure: of the model and the loss, asked before; what it knows is not asked again.  follow: is told where tensors
    lie, now and whenever they lie elsewhere.
    """

    def __init__(
        self, observed: Observed, roots: Sequence[tuple[str, Any]], structure: Structure,
        follow: Callable[[Lying], None],
    ) -> None:  # fmt: skip
        self._observed, self._roots, self.structure, self._follow = observed, roots, structure, follow
        walk = Walk(self._observed).run(self._roots)
        refuse_iterators(walk)
        self.meaning, self.labels = walk.meaning, walk.labels
        self._take(walk)

    def _take(self, walk: Walk) -> None:
        """Ask those places from now on."""
        self._places = Placed(walk, self.structure.groups)
        self._follow(Lying(walk))

    @property
    def count(self) -> int:
        """How many places are asked."""
        return len(self._places)

    def stands(self, structure: Structure) -> bool:
        """Whether all is as it was when the places were last taken, as far as that can be told at once."""
        return structure is self.structure and self._places.same()

    def still_means(self, structure: Structure, functions_there: Functions | None = None) -> bool:
        """Whether the graph serves, found out by another walk.  structure: as it is now; where modules or tensors have
        been replaced, those that the code asked something of may be others.  functions_there: as walks share them.
        """
        walk = Walk(self._observed, functions_there).run(self._roots)
        if walk.meaning != self.meaning:
            return False
        self.structure = structure
        self._take(walk)
        return True

    def changed(self, functions_there: Functions | None = None) -> str:
        """The first of what is not as it was, as a user would write it; "" if all is."""
        walk = Walk(self._observed, functions_there).run(self._roots)
        pairs = zip(self.meaning, walk.meaning, strict=False)
        index = next((i for i, (before, now) in enumerate(pairs) if before != now), None)
        if index is None:
            return walk.labels[-1] if len(walk.meaning) != len(self.meaning) else ""
        added = walk.labels[index]
        return added if added not in self.labels else self.labels[index]


class Placed:
    """Where the values of a walk lie, by the kinds of places.

    A tensor that lies in one place only may be replaced by another of its description, which is then the one read;
    not one whose value Python looked at.
    """

    def __init__(self, walk: Walk, known: frozenset[int]) -> None:
        """known: the identities of dicts whose entries and tensors have been asked."""
        counts = collections.Counter(id(t) for t, _ in walk.tensors)
        asked = {id(t) for t, place in walk.tensors if place is not None and id(place[0]) in known}
        tensors = [(t, place) for t, place in walk.tensors if id(t) not in asked]
        looked = {id(t) for t, _ in walk.looked}
        lying = [(t, p) for t, p in tensors if p is not None and counts[id(t)] == 1 and id(t) not in looked]
        apart = {(id(place[0]), place[1]) for _, place in lying}
        left = [s for s in walk.slots if id(s[0]) not in known and (id(s[0]), s[1]) not in apart]
        self.slots = Slots([s for s in left if s[2] is not MISSING], dict.get)
        self.absent = Absent([s for s in left if s[2] is MISSING])
        self.classes = Slots(walk.classes, MappingProxyType.get)
        self.cells, self.contents = [c for c, _ in walk.cells], [held for _, held in walk.cells]
        self.functions = walk.functions
        self.codes = [part for f in walk.functions for part in _CODE(f)]
        self.named = walk.keys
        self.items = [(get, held) for get, held in walk.items if id(getattr(get, "__self__", None)) not in known]
        self.hookless = walk.hookless
        self.objects, self.kinds = [value for value, _ in walk.kinds], [kind for _, kind in walk.kinds]
        self.arrays, self.looked = walk.arrays, walk.looked
        self.holders, self.keys = [place[0] for _, place in lying], [place[1] for _, place in lying]
        own = {id(t) for t, _ in lying}
        self.fixed = list({id(t): t for t, _ in tensors if id(t) not in own}.values())
        self.tensors = Tensors([t for t, _ in lying] + self.fixed)
        self._things = [tuple(map(id, held)) for _, held in self.items]  # kept alive by the list of items
        each: tuple[tuple[Sized, Callable[[], bool]], ...] = (
            (self.slots, self.slots.same), (self.absent, self.absent.same), (self.classes, self.classes.same),
            (self.hookless, self._no_hooks), (self.objects, self._same_kinds),
            (self.cells, self._same_contents), (self.functions, self._same_codes),
            (self.named, self._same_names), (self.items, self._same_items), (self.holders, self._same_tensors),
            (self.fixed, self._same_tensors), ([*self.arrays, *self.looked], self._same_values),
        )  # fmt: skip
        self._count = sum(len(places) for places, _ in each)
        self._questions = list(dict.fromkeys(ask for places, ask in each if len(places)))  # of few kinds, mostly

    def __len__(self) -> int:
        return self._count

    def same(self) -> bool:
        """Whether all is as it was, as far as that can be told at once."""
        return all(ask() for ask in self._questions)

    def _no_hooks(self) -> bool:
        return not any(chain.from_iterable(map(_HOOKS, self.hookless)))

    def _same_kinds(self) -> bool:
        return all(map(operator.is_, map(type, self.objects), self.kinds))

    def _same_contents(self) -> bool:
        return all(map(operator.is_, map(contents, self.cells), self.contents))

    def _same_codes(self) -> bool:
        return all(map(operator.is_, chain.from_iterable(map(_CODE, self.functions)), self.codes))

    def _same_names(self) -> bool:
        return all(tuple(get()) == held for get, held in self.named)

    def _same_items(self) -> bool:
        return [tuple(map(id, get())) for get, _ in self.items] == self._things

    def _same_tensors(self) -> bool:
        return self.tensors.same([*map(dict.get, self.holders, self.keys), *self.fixed])

    def _same_values(self) -> bool:
        return all(_equal(a, b) for a, b in self.arrays) and all(asked.is_answered_alike(t) for t, asked in self.looked)


class Lying:
    """Where tensors lie that a graph holds as constants, and what is written to.  Walks of one meaning meet them alike.

    containers: the lists, dicts and the like.
    """

    def __init__(self, walk: Walk) -> None:
        self.containers = walk.containers
        counts = collections.Counter(id(t) for t, _ in walk.tensors)
        self._known = [(t, place if counts[id(t)] == 1 else None) for t, place in walk.tensors]

    def number(self, constant: torch.Tensor) -> int | None:
        """The number of the tensor that a constant is, or has the memory of; None for none of the walk."""
        known, own = [tensor for tensor, _ in self._known], place_of(constant)
        same = (i for i, tensor in enumerate(known) if tensor is constant)
        alike = (i for i, tensor in enumerate(known) if own is not None and place_of(tensor) == own)
        return next(chain(same, alike), None)

    def number_of_container(self, held: Any) -> int | None:
        """The number of a list or dict; None for what is none of the walk."""
        return next((i for i, container in enumerate(self.containers) if container is held), None)

    def at(self, number: int) -> Any:
        """The place `(dict, key)` of a tensor by its number; the tensor itself where it lies in none, or in several."""
        tensor, place = self._known[number]
        return tensor if place is None else place


def refuse_iterators(walk: Walk) -> None:
    """What an iterator gives next is another thing at every call, and taking it changes it."""
    if walk.iterators:
        raise NotYetSupported(
            f"the code reads an iterator, {walk.iterators[0]}", where="the model or the loss",
            why="what comes next is another value at every call, and a graph would hold the first for ever",
            fix="take the next value outside, and pass it as an input",
        )  # fmt: skip


def _equal(now: Any, before: Any) -> bool:
    return bool(now.shape == before.shape and now.dtype == before.dtype and now.tobytes() == before.tobytes())
