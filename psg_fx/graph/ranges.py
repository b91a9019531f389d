"""Between which numbers all elements of a value lie, as the ops that make it say."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from psg_fx.graph.lifetimes import is_view

Range = tuple[float, float]
_ANY: Range = (-math.inf, math.inf)
_OF: dict[str, Range] = {
    "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "hardsigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0), "relu": (0.0, math.inf), "abs": (0.0, math.inf), "square": (0.0, math.inf),
    "exp": (0.0, math.inf),
}  # fmt: skip
_PASS = ("clone", "reshape", "_to_copy", "detach", "alias")


def range_of(node: Any) -> Range:
    """The smallest and the largest number that a value may have, as its dtype rounds them; NaN is left out."""
    if isinstance(node, (int, float)):
        return float(node), float(node)
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
        return _ANY
    name = node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""
    if name in _PASS or is_view(node):
        return _rounded(range_of(node.args[0]), value.dtype)
    if name in ("clamp", "clamp_min", "clamp_max"):
        return _rounded(_clamped(node, name), value.dtype)
    if name in ("add", "sub", "rsub") and len(node.args) == 2 and not node.kwargs:
        one, other = map(range_of, node.args)
        one, other = (other, one) if name == "rsub" else (one, other)
        other = other if name == "add" else (-other[1], -other[0])
        return _sum(one, other, value.dtype)
    return _OF.get(name, _ANY)


def _clamped(node: Node, name: str) -> Range:
    low, high = range_of(node.args[0])
    given = dict(zip(("min", "max") if name == "clamp" else (name[-3:],), node.args[1:], strict=False)) | node.kwargs
    least, most = given.get("min"), given.get("max")
    if isinstance(least, (int, float)):
        low, high = max(low, least), max(high, least)
    if isinstance(most, (int, float)):
        low, high = min(low, most), min(high, most)
    return float(low), float(high)


def _rounded(found: Range, dtype: torch.dtype) -> Range:
    low, high = (torch.tensor(number, dtype=dtype).item() for number in found)
    return low, high


def _sum(one: Range, other: Range, dtype: torch.dtype) -> Range:
    largest = max(map(abs, (*one, *other)))
    error = 2 * torch.finfo(dtype).eps * largest
    return (one[0] + other[0] - error, one[1] + other[1] + error) if math.isfinite(largest) else _ANY
