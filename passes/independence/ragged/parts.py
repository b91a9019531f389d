"""What is known of the parts of structure that are a sample's: see `alone.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from ..values import NUMBERING

_WHOLE = (torch.float32, torch.float64)
"""Floats in which places are exact: a mask of more than 2^24 rows fits nowhere."""
_DECIDES = {
    "__and__": False, "bitwise_and": False, "logical_and": False, "mul": False,
    "__or__": True, "bitwise_or": True, "logical_or": True,
}  # fmt: skip
"""The entry of one mask that decides an op of two."""
_IGNORES = {"any": False, "sum": False, "count_nonzero": False, "all": True}
"""The entries that a reduction of a mask is the same without."""


@dataclass(frozen=True)
class Part:
    """The part of a value that is a sample's: v_alone + Σ starts[axis] start[axis].

    plus: v is the place (or id) of a row of the sample, + this; None for anything else.
    ordered: it holds if rows of these axes are in the order of their samples.
    between: of a mask of pairs, what it is for two of different samples, True as 1; None if that is not known.
    """

    starts: Mapping[sympy.Symbol, int]
    plus: int | None = None
    ordered: frozenset[sympy.Symbol] = frozenset()
    between: bool | None = None


def between(name: str, dtype: torch.dtype, known: Sequence[bool | None]) -> bool | None:
    """What a function is for two of different samples, if its operands tell: 0 (False) or 1 (True)."""
    if name == "logical_not" or (name == "bitwise_not" and dtype == torch.bool):
        return None if known[0] is None else not known[0]
    if name not in _DECIDES or dtype.is_floating_point:  # 0 · inf is no number
        return None
    decides = _DECIDES[name]
    if None in known:
        return decides if decides in known and (dtype == torch.bool or not decides) else None  # 2 & 0 is 0, 2 | 1 is 3
    return decides if decides in known else not decides


def number(given: object) -> bool | None:
    """What a number in the code is as an operand of a mask: that of 0 and 1 alone."""
    return bool(given) if isinstance(given, (bool, int)) and given in (0, 1) else None


def ignores(name: str, part: Part) -> bool:
    """Whether a reduction of a mask of pairs is the same with and without those of different samples."""
    return part.between is not None and part.between is _IGNORES.get(name)


def needed_order(parts: Iterable[Part]) -> frozenset[sympy.Symbol]:
    """The axes whose rows must be in order for all of them."""
    return frozenset().union(*(part.ordered for part in parts))


def holds(node: Node) -> bool:
    """Whether places are exact in its dtype."""
    return node.meta["val"].dtype in (*NUMBERING, *_WHOLE)


__all__ = ["Part", "between", "holds", "ignores", "needed_order", "number"]
