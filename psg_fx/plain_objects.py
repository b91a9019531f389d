"""Objects with tensors among the arguments of a call: dataclasses, `SimpleNamespace`, objects of plain classes.

Pytrees take them for leaves.  Here they look into them, by their attributes; what a pytree puts together again is a new
object of the same class.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument
from psg_fx.tensors import SYMBOLS


def is_plain(value: Any) -> bool:
    """Whether an object is what its attributes are."""
    kind: Any = type(value)
    if isinstance(value, (nn.Module, type, *SYMBOLS)) or not hasattr(value, "__dict__") or callable(value):
        return False
    if issubclass(kind, (tuple, list, dict, set, torch.Tensor)) or any(vars(k).get("__slots__") for k in kind.__mro__):
        return False
    made_plainly = kind.__new__ in (object.__new__, types.SimpleNamespace.__new__)
    return made_plainly and kind.__reduce_ex__ is object.__reduce_ex__


def with_attributes(kind: Any, names: Iterable[str], values: Iterable[Any]) -> Any:
    """A new object of a plain class; no code of the class runs."""
    made = kind.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


class Given:
    """An object that pytrees look into; put together again it is one like it."""

    def __init__(self, kind: type, parts: dict[str, Any]) -> None:
        self.kind, self.parts = kind, parts


def _flatten(given: Given) -> tuple[list[Any], Any]:
    return list(given.parts.values()), (given.kind, tuple(given.parts))


def _flatten_with_keys(given: Given) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
    return [(pytree.MappingKey(name), part) for name, part in given.parts.items()], (given.kind, tuple(given.parts))


def _unflatten(values: Any, context: Any) -> Any:
    kind, names = context
    made = with_attributes(kind, names, values)
    if (seen := getattr(_MAKING, "seen", None)) is not None:
        seen.append(made)
    return made


_MAKING = threading.local()
_ABSENT = object()


class NotWritten:
    """The objects that are put together in a block, and what code has written into them since."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, dict[str, Any]]] = []

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Objects that this thread puts together meanwhile are watched."""
        before, _MAKING.seen = getattr(_MAKING, "seen", None), []
        try:
            yield
            self._before = [(value, dict(vars(value))) for value in _MAKING.seen]
        finally:
            _MAKING.seen = before

    def written(self) -> str:
        """The first attribute that is another one now: `Batch.x`; "" for none."""
        for value, before in self._before:
            now = vars(value)
            for name in (*before, *now):
                if before.get(name, _ABSENT) is not now.get(name, _ABSENT):
                    return f"{type(value).__name__}.{name}"
        return ""


pytree.register_pytree_node(Given, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def looked_into(structure: Any) -> Any:
    """A pytree with a `Given` for each object that holds tensors."""
    leaves = pytree.tree_leaves(structure, is_leaf=_is_packed)
    if not any(map(_may_hold, leaves)):
        return structure
    return pytree.tree_map(_looked_into_one, structure, is_leaf=_is_packed)


def _looked_into_one(leaf: Any) -> Any:
    return _looked_into(leaf, set())


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _may_hold(leaf: Any) -> bool:
    """Whether a leaf may be such an object.  What maps keys to values may keep more than those."""
    return not isinstance(leaf, (torch.Tensor, Mapping)) and is_plain(leaf)


def _looked_into(structure: Any, seen: set[int]) -> Any:
    """seen: the objects in it that were met before: what is put together again would be two."""

    def part(leaf: Any) -> Any:
        if not _may_hold(leaf):
            return leaf
        if id(leaf) in seen:
            raise BadArgument(
                f"a {type(leaf).__name__} is found twice in an object", where="step(inputs, targets)",
                why="the code is given new objects, and would be given two in its place",
                fix="pass the tensors in tuples and dicts",
            )  # fmt: skip
        seen.add(id(leaf))
        parts = {name: _looked_into(each, seen) for name, each in vars(leaf).items()}
        found = pytree.tree_leaves(parts, is_leaf=_is_packed)
        return Given(type(leaf), parts) if any(isinstance(each, torch.Tensor) for each in found) else leaf

    return pytree.tree_map(part, structure, is_leaf=_is_packed)
