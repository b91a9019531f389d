"""Objects with tensors among the arguments of a call: dataclasses, `SimpleNamespace`, objects of plain classes.

Pytrees take them for leaves.  Here they look into them, by their attributes; what a pytree puts together again is a new
object of the same class.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


def is_plain(value: Any) -> bool:
    """Whether an object is what its attributes are."""
    kind: Any = type(value)
    if isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__") or callable(value):
        return False
    if issubclass(kind, (tuple, list, dict, set, torch.Tensor)) or any(vars(k).get("__slots__") for k in kind.__mro__):
        return False
    made_plainly = kind.__new__ in (object.__new__, types.SimpleNamespace.__new__)
    return made_plainly and kind.__reduce_ex__ is object.__reduce_ex__


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
    made = kind.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(Given, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def looked_into(structure: Any) -> Any:
    """A pytree with a `Given` for each object that holds tensors."""
    leaves = pytree.tree_leaves(structure, is_leaf=_is_packed)
    return _looked_into(structure, frozenset()) if any(map(_may_hold, leaves)) else structure


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _may_hold(leaf: Any) -> bool:
    """Whether a leaf may be such an object.  What maps keys to values may keep more than those."""
    return not isinstance(leaf, (torch.Tensor, Mapping)) and is_plain(leaf)


def _looked_into(structure: Any, inside: frozenset[int]) -> Any:
    def part(leaf: Any) -> Any:
        if id(leaf) in inside or not _may_hold(leaf):
            return leaf
        parts = {name: _looked_into(each, inside | {id(leaf)}) for name, each in vars(leaf).items()}
        found = pytree.tree_leaves(parts, is_leaf=_is_packed)
        return Given(type(leaf), parts) if any(isinstance(each, torch.Tensor) for each in found) else leaf

    return pytree.tree_map(part, structure, is_leaf=_is_packed)
