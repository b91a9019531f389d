"""Small buffers that code decides by: `if self.initialised:`, `for _ in range(self.steps)`, `self.sizes.tolist()`,
`x[:, self.mask]`.

A captured graph has no values, but a model's own buffers have some, and the branch that they lead to is the model's as
long as they keep them: which the guard asks at every call, as it does of all values that Python has looked at.  So such
questions are answered by what the buffer holds, until the code writes into one.  Numbers that are computed with
(`.item()` of an integer; of bool and uint8 it is a switch) stay in the graph, where they may be others at each call.
Tensors that the code makes of numbers (`torch.tensor([0, 2])`, `torch.arange(4) != 2`) have these for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from psg_fx.program.stand_ins import StandIns
from psg_fx.program.values import Same
from psg_fx.tensors import SYMBOLS
from psg_fx.torch_private.modes import no_modes, without_functions

_SMALL = 64
LARGE_MASK = 4096
"""Numbers of a mask that picks columns: an image's, say."""
_SWITCHES = (torch.bool, torch.uint8)
_WHOLE = (*_SWITCHES, torch.int8, torch.int16, torch.int32, torch.int64)


def _functions(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.Tensor, name) for name in names.split())


_OF_FLOATS = _functions("__bool__ tolist")
"""Questions that are answered by floats, too."""
_DECIDING = _functions("__bool__ __index__ tolist __format__ __repr__")
_READING = _functions("item __int__ __float__")
_COMPUTING = _functions(
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge logical_not logical_and logical_or any all sum max "
    "min add sub mul remainder __floordiv__ __and__ __or__ __xor__ __invert__ __getitem__"
)
"""What is computed of such buffers to decide by; nothing that writes, or draws."""

_MAKING = frozenset({torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.eye})
"""What makes tensors of numbers that the code has."""

_IN_BULK = "_foreach_"
"""Functions that write into many tensors at once, and do not count it."""

_Known = tuple[torch.Tensor, list[Same]]
"""The values of a tensor, and the buffers that they follow from."""


class Flags:
    """What is known of small buffers, and of what is computed from those of whole numbers alone."""

    def __init__(self, stand_ins: StandIns) -> None:
        buffers = [(own, other) for own, other in stand_ins.pairs() if not isinstance(own, nn.Parameter)]
        limit = {torch.bool: LARGE_MASK}
        small = [(own, other) for own, other in buffers if own.numel() <= limit.get(own.dtype, _SMALL)]
        self._own = {id(own): own for own, _ in small}
        self._others = [other for _, other in small]
        self._versions = self._versions_now()
        self._made = WeakIdKeyDictionary()
        self._in_bulk = False

    def answer(self, func: Any, args: Sequence[Any]) -> tuple[Any, list[Same]] | None:
        """What a question to one of them has for an answer, and the buffers that it follows from; None for others."""
        if func not in _DECIDING and func not in _READING:
            return None
        found = self._known(args[0], of_floats=func in _OF_FLOATS)
        if found is None or (func in _READING and found[0].dtype not in _SWITCHES):
            return None
        with no_modes(), without_functions():
            return func(found[0], *args[1:]), found[1]

    def values_of(self, tensor: torch.Tensor) -> _Known | None:
        """What is known of one that decides; None for others."""
        return self._known(tensor)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the buffers."""
        return id(tensor) in self._own

    def computed(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """A function has been called on these, and has returned this."""
        self._in_bulk = self._in_bulk or _IN_BULK in getattr(func, "__name__", "")
        if not isinstance(result, torch.Tensor) or result.dtype not in _WHOLE:
            return
        if func not in _MAKING and (func not in _COMPUTING or not (self._own or self._made)):
            return
        leaves = pytree.tree_leaves((args, kwargs))
        numbers = [bound for v in leaves for bound in ((v.start, v.stop, v.step) if isinstance(v, slice) else (v,))]
        if any(isinstance(v, SYMBOLS) for v in numbers):
            return  # sizes that follow the batch
        if func in _MAKING and result.numel() > LARGE_MASK:
            return
        known = [self._known(t) for t in leaves if isinstance(t, torch.Tensor)]
        if any(found is None for found in known):
            return
        values = iter([found[0] for found in known if found is not None])
        named = {name: value for name, value in kwargs.items() if name != "device"}
        real = pytree.tree_map_only(torch.Tensor, lambda _: next(values), (args, named))
        with no_modes(), without_functions(), torch.no_grad():
            value = func(*real[0], **real[1]).clone()
            version = result._version
        self._made[result] = version, (value, [same for found in known if found is not None for same in found[1]])

    def _known(self, tensor: Any, of_floats: bool = False) -> _Known | None:
        if not isinstance(tensor, torch.Tensor) or self._in_bulk or self._versions_now() != self._versions:
            return None  # the code has written into some buffer, perhaps this one
        if id(tensor) not in self._own:
            version, made = self._made.get(tensor, (None, None))
            with without_functions():
                return made if version == tensor._version else None  # nor into this one
        return (tensor, [Same(tensor)]) if tensor.dtype in _WHOLE or of_floats else None

    def _versions_now(self) -> list[int]:
        with without_functions():
            return [other._version for other in self._others]
