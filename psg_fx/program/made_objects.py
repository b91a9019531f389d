"""Objects that the code makes of tensors, and keeps: `self.distribution = Categorical(logits=h)`.

They are taken apart like lists and dicts, by their attributes; what a step leaves is a new object of the same class.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.plain_objects import is_plain, with_attributes
from psg_fx.program.arguments.packed import is_packed
from psg_fx.tensors import SYMBOLS
from psg_fx.torch_private.fakes import FakeTensor


class _Opened:
    """An object, or sizes, that pytrees look into; put together again it is a new one of the same class."""

    def __init__(self, kind: type, parts: dict[str, Any] | list[Any]) -> None:
        self.kind, self.parts = kind, parts


def _flatten(opened: _Opened) -> tuple[list[Any], Any]:
    if isinstance(opened.parts, list):
        return opened.parts, (opened.kind, None)
    return list(opened.parts.values()), (opened.kind, tuple(opened.parts))


def _unflatten(values: Any, context: Any) -> Any:
    kind, names = context
    if names is None:
        return kind(values)
    made = with_attributes(kind, names, values)
    place = id(made)
    for known in (made, *(each for each in values if isinstance(each, torch.Tensor))):
        with contextlib.suppress(TypeError):  # a SimpleNamespace has no weak references: then a tensor that it holds
            _MADE[place] = weakref.ref(known, lambda _: _MADE.pop(place, None))
            break
    return made


_MADE: dict[int, weakref.ref[Any]] = {}
"""Objects that steps have made, or a tensor in them, by where they lie."""


def is_made(value: Any) -> bool:
    """Whether a step has made an object: every step makes another one, and what it holds is all that it is."""
    known = _MADE.get(id(value))
    found = None if known is None else known()
    return found is not None and any(found is each for each in (value, *getattr(value, "__dict__", {}).values()))


pytree.register_pytree_node(_Opened, _flatten, _unflatten)


def opened(value: Any) -> Any:
    """A value in which pytrees find the tensors and numbers of objects that the code has made, and those of sizes."""
    return _open(value, frozenset())


def _open(value: Any, inside: frozenset[int]) -> Any:
    def part(leaf: Any) -> Any:
        if type(leaf) is torch.Size:
            return _Opened(torch.Size, list(leaf))
        if id(leaf) in inside or not is_plain(leaf):
            return leaf
        parts = {name: _open(each, inside | {id(leaf)}) for name, each in vars(leaf).items()}
        found = pytree.tree_leaves(parts, is_leaf=is_packed)
        of_a_call = [each for each in found if isinstance(each, (torch.Tensor, *SYMBOLS))]
        made = of_a_call and all(isinstance(each, (FakeTensor, *SYMBOLS)) for each in of_a_call)
        return _Opened(type(leaf), parts) if made else leaf

    return pytree.tree_map(part, value, is_leaf=lambda each: is_packed(each) or type(each) is torch.Size)
