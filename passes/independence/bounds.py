"""Between which integers the values of a node lie in the program of one sample, as far as its ops say so."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.op_table import bounded, known

from .arguments import bound

Bounds = tuple[float, float]
_DEPTH = 40
_ANYTHING: Bounds = (-math.inf, math.inf)


def bounds(value: Any, depth: int = _DEPTH) -> Bounds:
    """(lowest, highest) of the integers of a node or of a number; the numbers of the samples, `arange(B)`, are 0."""
    if isinstance(value, (int, float)):
        return (value, value)
    if not isinstance(value, Node) or depth == 0 or value.op != "call_function":
        return _ANYTHING
    tensor = value.meta.get("val")
    if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool:
        return (0, 1)
    if value.target is operator.getitem:
        return _of_a_part(value, depth)
    rule = known(value.target).bounds
    if rule is None or not isinstance(tensor, torch.Tensor):
        return _ANYTHING
    return _held(rule(bound(value), lambda v: bounds(v, depth - 1)), tensor.dtype)


def _held(found: Bounds, dtype: torch.dtype) -> Bounds:
    """The bounds of such values in a dtype: floats are rounded, integers have no digits behind the point, and wrap
    around.
    """
    if dtype.is_complex:
        return _ANYTHING
    if dtype.is_floating_point:
        low, high = torch.tensor(found, dtype=torch.float64).to(dtype).tolist()
        return (low, high)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    low, high = (least if found[0] == -math.inf else found[0]), (most if found[1] == math.inf else found[1])
    return (math.floor(low), math.ceil(high)) if least <= low and high <= most else _ANYTHING


def _of_a_part(value: Node, depth: int) -> Bounds:
    """One of several outputs: a part of a tensor, or the values and places of `max` and `sort`."""
    source, index = value.args
    assert isinstance(source, Node)
    if not isinstance(source.target, torch._ops.OpOverload):
        return _ANYTHING
    op = source.target.overloadpacket
    if op in _WITH_PLACES:
        return bounds(source.args[0], depth - 1) if index == 0 else _places(bound(source))
    return bounds(source.args[0], depth - 1) if op in _PARTS else _ANYTHING


_WITH_PLACES = (torch.ops.aten.max, torch.ops.aten.min, torch.ops.aten.sort, torch.ops.aten.topk)
_PARTS = (torch.ops.aten.unbind, torch.ops.aten.split, torch.ops.aten.split_with_sizes, torch.ops.aten.chunk)


def _places(given: dict[str, Any]) -> Bounds:
    """Places along a dim."""
    source, dim = given["self"], given.get("dim", -1)
    shape = source.meta["val"].shape
    size = math.prod(shape) if dim is None else shape[dim] if len(shape) else 1
    return (0, size - 1) if isinstance(size, int) else _ANYTHING


Given = dict[str, Any]
Question = Callable[[Any], Bounds]
_MOVING = """
    view reshape _unsafe_view flatten unflatten unsqueeze squeeze expand expand_as permute transpose t alias clone
    contiguous detach lift_fresh lift_fresh_copy slice select index index_select gather repeat flip roll
    narrow movedim repeat_interleave tile
"""


@bounded(*_MOVING.split())
def _moved(given: Given, ask: Question) -> Bounds:
    """Elements of a tensor, elsewhere; not those of one that says how often others are there, or of its bytes."""
    return ask(given["self"]) if "self" in given and "dtype" not in given else _ANYTHING


@bounded("to", "_to_copy")
def _converted(given: Given, ask: Question) -> Bounds:
    return ask(given["self"])


@bounded("arange")
def _arange(given: Given, ask: Question) -> Bounds:
    start, step = given.get("start", 0), given.get("step", 1)
    end = given["end"]
    if isinstance(end, Node) and isinstance(end.meta.get("val"), torch.SymInt):  # arange(B * T), where B is 1
        end = facts.at_one(end.meta["val"])
    if not all(isinstance(value, int) for value in (start, end, step)):
        return _ANYTHING
    found = range(start, end, step)
    return (min(found), max(found)) if found else (0, 0)


@bounded("clamp", "clip", "clamp_min", "clamp_max")
def _clamp(given: Given, ask: Question) -> Bounds:
    """min(max(x, least), most) grows with each of the three."""
    least = (-math.inf, -math.inf) if given.get("min") is None else ask(given["min"])
    most = (math.inf, math.inf) if given.get("max") is None else ask(given["max"])
    low, high = (min(max(end, a), b) for end, a, b in zip(ask(given["self"]), least, most, strict=True))
    return (low, high)


@bounded("minimum", "fmin", "min.other")
def _minimum(given: Given, ask: Question) -> Bounds:
    (a, b), (c, d) = ask(given["self"]), ask(given["other"])
    return (min(a, c), min(b, d))


@bounded("maximum", "fmax", "max.other")
def _maximum(given: Given, ask: Question) -> Bounds:
    (a, b), (c, d) = ask(given["self"]), ask(given["other"])
    return (max(a, c), max(b, d))


@bounded("remainder")
def _remainder(given: Given, ask: Question) -> Bounds:
    low, high = ask(given["other"])
    whole = all(_is_whole(given[name]) for name in ("self", "other"))
    return (0, high - whole) if 0 < low == high < math.inf else _ANYTHING


def _is_whole(value: Any) -> bool:
    known = value.meta["val"] if isinstance(value, Node) else value
    if isinstance(known, torch.Tensor):
        return not facts.is_differentiable(known)
    return isinstance(known, (int, torch.SymInt))


@bounded("add")
def _add(given: Given, ask: Question) -> Bounds:
    (a, b), (c, d) = ask(given["self"]), ask(given["other"])
    return (a + c, b + d) if given.get("alpha", 1) == 1 else _ANYTHING


@bounded("sub")
def _sub(given: Given, ask: Question) -> Bounds:
    (a, b), (c, d) = ask(given["self"]), ask(given["other"])
    return (a - d, b - c) if given.get("alpha", 1) == 1 else _ANYTHING


@bounded("mul", "multiply")
def _mul(given: Given, ask: Question) -> Bounds:
    left, right = ask(given["self"]), ask(given["other"])
    ends = [0 if 0 in (x, y) else x * y for x in left for y in right]
    return (min(ends), max(ends))


@bounded("where")
def _where(given: Given, ask: Question) -> Bounds:
    (a, b), (c, d) = ask(given["self"]), ask(given["other"])
    return (min(a, c), max(b, d))


@bounded("full", "full_like")
def _fill(given: Given, ask: Question) -> Bounds:
    return ask(given["fill_value"])


@bounded("zeros", "zeros_like")
def _zeros(given: Given, ask: Question) -> Bounds:
    return (0, 0)


@bounded("ones", "ones_like")
def _ones(given: Given, ask: Question) -> Bounds:
    return (1, 1)


@bounded("argmax", "argmin", "argsort")
def _along_a_dim(given: Given, ask: Question) -> Bounds:
    return _places(given)
