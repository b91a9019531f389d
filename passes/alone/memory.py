"""Whether a value and its copy, which for one sample are one, are read after a write into the other."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from psg_fx.op_table import known
from psg_fx.program.code import users_line
from psg_fx.tensors import storage_of
from psg_fx.torch_private.modes import TorchDispatchMode
from psg_fx.torch_private.ops import writes, written_of

aten = torch.ops.aten
_OVERWRITES = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
_NEW = (aten.lift_fresh.default,)
"""Ops that give memory of a tensor that the code has just made, and no op is known to have."""


@dataclass
class Pair:
    """A value and its copy; and which of the two is no longer what it is where they are one."""

    value: Tensor
    copy: Tensor
    value_is_old: bool = False
    copy_is_old: bool = False


class Memory(TorchDispatchMode):
    """While open on one sample, with the copies that several have, it is noted what is read too late."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._late: str | None = None
        self._pairs: list[Pair] = []
        self._made: set[int] = set()

    def copied(self, value: Tensor) -> Tensor:
        """A copy of what lies in memory as it is needed, and would not be copied."""
        copy = value.clone()
        self._pairs.append(Pair(value, copy))
        return copy

    def read_late(self, returned: Iterable[Tensor]) -> str | None:
        """What reads one of two after a write into the other; None for nothing.  returned: by the code."""
        if self._late is None and any(map(self._is_old, returned)):
            self._late = "whoever has the results"
        for pair in self._pairs:
            if pair.value_is_old and storage_of(pair.value) not in self._made:  # it was there before the run
                self._late = self._late or "the next call"
        return self._late

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_view = _is_view(func)
        if self._pairs and not is_view:
            self._note(func, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        if not (is_view or writes(func)) or func in _NEW:
            self._made |= {place for t in _tensors(found) if (place := storage_of(t)) is not None}
        return found

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """What an op reads, and then writes."""
        written = _written(func, args, kwargs) if writes(func) else []
        rule, read = known(func).samples, _tensors((args[func in _OVERWRITES :], kwargs))
        if self._late is None and not (rule and rule.shapes_only) and any(map(self._is_old, read)):
            self._late = f"{_name(func)} ({users_line(sys._getframe(2))})"
        for tensor in written:
            for pair in self._pairs if func in _OVERWRITES else ():
                pair.value_is_old &= not _places(tensor, pair.value).all()
                pair.copy_is_old &= not _places(tensor, pair.copy).all()
            self._write(tensor)

    def _is_old(self, tensor: Tensor) -> bool:
        """Whether it shows what a write into the other one of a pair would have changed."""
        return any(
            (pair.value_is_old and _places(tensor, pair.value).any())
            or (pair.copy_is_old and _places(tensor, pair.copy).any())
            for pair in self._pairs
        )

    def _write(self, tensor: Tensor, but: Pair | None = None) -> None:
        """Note whom a write into one of a pair would reach where they are one; and the copies of that."""
        for pair in self._pairs:
            if pair is but:
                continue
            if not pair.copy_is_old and _places(tensor, pair.value).any():
                pair.copy_is_old = True
                self._write(pair.copy, pair)
            if not pair.value_is_old and _places(tensor, pair.copy).any():
                pair.value_is_old = True
                self._write(pair.value, pair)


def _is_view(func: Any) -> bool:
    """Whether an op returns a part of what it is given, and reads nothing."""
    if func is aten._unsafe_view.default:
        return True
    schema = getattr(func, "_schema", None)
    return schema is not None and not writes(func) and any(value.alias_info is not None for value in schema.returns)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an op writes into."""
    return list(_tensors(written_of(func, args, kwargs)))


def _places(tensor: Tensor, other: Tensor) -> Tensor:
    """Of each element of another tensor, whether it lies in a place of this one."""
    if storage_of(tensor) != storage_of(other):
        return torch.zeros((), dtype=torch.bool)
    if tensor.itemsize != other.itemsize:
        return torch.ones((), dtype=torch.bool)
    places = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.bool)
    places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return places.as_strided(other.shape, other.stride(), other.storage_offset())


def _tensors(values: Any) -> Iterable[Tensor]:
    return (t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).partition(".")[0]


__all__ = ["Memory"]
