"""Places asked at every call, one step for each kind: keys of dicts, tensors, the modules of a tree."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from psg_fx.program.objects import MISSING, describe
from psg_fx.program.values import Once, Same
from psg_fx.torch_private.modes import tensor_guards

_HAS_NONE_OF: Callable[..., bool] = type(dict[Any, Any]().keys()).isdisjoint
_GRADIENT_HOOKS = operator.attrgetter("_backward_hooks")
_GROUPS = ("_parameters", "_buffers", "_modules")


class Slots:
    """Keys of many dicts, and what lay there."""

    def __init__(self, slots: Iterable[tuple[Any, Any, Any]], get: Callable[..., Any]) -> None:
        found = list(slots)
        self._get = get
        self._holders, self._keys, self._values = ([s[i] for s in found] for i in range(3))

    def __len__(self) -> int:
        return len(self._keys)

    def same(self) -> bool:
        """Whether the same objects lie there."""
        return all(map(operator.is_, map(self._get, self._holders, self._keys, repeat(MISSING)), self._values))


class Absent:
    """Keys that dicts do not have."""

    def __init__(self, slots: Iterable[tuple[Any, Any, Any]]) -> None:
        found: dict[int, tuple[Any, set[Any]]] = {}
        for holder, key, _ in slots:
            found.setdefault(id(holder), (holder, set()))[1].add(key)
        self._views, self._keys = [h.keys() for h, _ in found.values()], [keys for _, keys in found.values()]

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def same(self) -> bool:
        """Whether none of the keys is there."""
        return all(map(_HAS_NONE_OF, self._views, self._keys))


class Tensors:
    """Different tensors: they, or others in their places, are to be of the same descriptions."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._descriptions = [describe(t) for t in tensors]
        self._quick: dict[bool, Any] = {}

    def same(self, now: Sequence[Any] | None = None) -> bool:
        """Whether the tensors have kept their descriptions, and are still different ones."""
        now = self._tensors if now is None else now
        if not now:
            return True
        inference = torch.is_inference_mode_enabled()
        quick = self._quick.get(inference)
        if quick is not None and quick(*now):  # which no tensor passes twice
            return True
        same = len(set(map(id, now))) == len(now) and all(
            isinstance(t, torch.Tensor) and describe(t) == d for t, d in zip(now, self._descriptions, strict=True)
        )
        if same and quick is None and all(t.layout is torch.strided for t in now):  # torch's guards ask for strides
            self._quick[inference] = tensor_guards(now)
        return same


class Structure:
    """The modules, parameters and buffers of module trees: which there are, and of which description."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        modules = [m for root in roots for m in root.modules()]
        groups = [m.__dict__[g] for m in modules for g in _GROUPS]
        entries = [(group, key, value) for group in groups for key, value in group.items()]
        self._modules, self._kinds = modules, [type(m) for m in modules]
        self._empty, self._filled = [g for g in groups if not g], [g for g in groups if g]
        self._count = len(entries)
        self.groups = frozenset(map(id, groups))
        owners = [(m.__dict__, g, m.__dict__[g]) for m in modules for g in _GROUPS]
        self._slots = Slots(owners + entries, dict.get)
        self.held = [t for _, _, t in entries if isinstance(t, torch.Tensor)]
        self._tensors = Tensors(list({id(t): t for t in self.held}.values()))
        order: dict[int, int] = {}
        tied = [order.setdefault(id(t), len(order)) for t in self.held]
        meaning = (
            tuple((Same(m), Same(type(m))) for m in modules), tuple(map(Same, groups)),
            tuple((k, None if isinstance(v, torch.Tensor) or v is None else Same(v)) for _, k, v in entries),
            tuple(tied), tuple(describe(t) for t in self.held),
        )  # fmt: skip
        self.meaning = Once(meaning)

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            self._slots.same()
            and not any(self._empty)
            and sum(map(len, self._filled)) == self._count
            and all(map(operator.is_, map(type, self._modules), self._kinds))
            and self._tensors.same()
        )

    def has_hooks(self) -> bool:
        """Whether a parameter has hooks on its gradient."""
        return any(map(_GRADIENT_HOOKS, self.held))
