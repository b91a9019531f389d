"""Random numbers from [0, 1) that are compared with a bound which all of them pass, or none: `torch.rand([]) < 0.0`, as
layers ask that are left out with a probability, where it is 0.

`torch.rand(1) > 0.0` is true but for a draw that is zero, one of 2^24: a step looks at every call whether it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_DRAWING = (torch.rand, torch.rand_like)

_COMPARING = {
    getattr(owner, name): name.strip("_")
    for owner, names in ((torch.Tensor, "__lt__ __le__ __gt__ __ge__ lt le gt ge"), (torch, "lt le gt ge"))
    for name in names.split()
}


class Draws:
    """What has been drawn from [0, 1)."""

    def __init__(self) -> None:
        self._versions = WeakIdKeyDictionary()

    def drawn(self, func: Any, result: Any) -> bool:
        """Note what a function has drawn; whether it is one that draws so."""
        if func in _DRAWING:
            self._versions[result] = result._version
        return func in _DRAWING

    def outcome(self, func: Any, args: Sequence[Any]) -> bool | None:
        """What a comparison says of each number that may have been drawn, or of one that is not zero; None where they
        differ, and for all else.
        """
        if not self._compares(func, args):
            return None
        name, bound = _COMPARING[func], args[1]
        if bound >= 1 or bound < 0 or (bound == 0 and name in ("lt", "ge")) or self.may_be_zero(func, args):
            return (name in ("lt", "le")) is (bound >= 1)
        return None

    def may_be_zero(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether the outcome is another one where the number that was drawn is zero."""
        if not self._compares(func, args):
            return False
        return args[1] == 0 and _COMPARING[func] in ("gt", "le") and all(size == 1 for size in args[0].shape)

    def _compares(self, func: Any, args: Sequence[Any]) -> bool:
        if func not in _COMPARING or len(args) != 2 or not isinstance(args[0], torch.Tensor):
            return False
        drawn, bound = args
        return type(bound) in (int, float) and self._versions.get(drawn, None) == drawn._version
