"""Random numbers from [0, 1) that are compared with a bound which all of them pass, or none: `torch.rand([]) < 0.0`, as
layers ask that are left out with a probability, where it is 0.
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
        """What a comparison says of each number that may have been drawn; None where they differ, and for all else."""
        if func not in _COMPARING or len(args) != 2 or not isinstance(args[0], torch.Tensor):
            return None
        drawn, bound = args
        if type(bound) not in (int, float) or self._versions.get(drawn, None) != drawn._version:
            return None
        name = _COMPARING[func]
        if bound >= 1 or bound < 0 or (bound == 0 and name in ("lt", "ge")):
            return (name in ("lt", "le")) is (bound >= 1)
        return None
