"""Integers that number the rows of a batch, each the same number of times in a row: `arange(N)`, and its k-fold."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.graph.order import is_reshaped, is_same
from psg_fx.tensors import product

from ..arguments import bound
from ..values import NUMBERING

aten = torch.ops.aten


@dataclass(frozen=True)
class Number:
    """Of row r: r // k, the row that k rows in turn stand for; or, within it, r % k, which of the k it is."""

    k: int
    within: bool = False


@dataclass(frozen=True)
class _Counted:
    """Values that are the place along the first `dims` dims, flattened, wherever they stand along the others."""

    shape: tuple[sympy.Expr, ...]
    dims: int


def number_of(node: Node, count: sympy.Expr) -> Number | None:
    """Which numbers a tensor `[count]` holds, if its ops say so."""
    shape = facts.shape(node.meta["val"])
    if len(shape) != 1 or shape[0] != count:
        return None
    if (divided := divisor(node)) is not None:
        source, k = divided
        return Number(k) if number_of(source, count) == Number(1) else None
    source, k = node, 1
    while is_same(source) or is_reshaped(source) or source.target is aten.repeat_interleave.self_int:
        if source.meta["val"].dtype not in NUMBERING:
            return None
        given = bound(source)
        if source.target is aten.repeat_interleave.self_int:
            if not isinstance(given["repeats"], int) or source.args[0].meta["val"].ndim != 1:  # type: ignore[union-attr]
                return None
            k *= given["repeats"]
        elif is_reshaped(source) and (found := _counted(source.args[0])) is not None:
            return _flattened(found, k)
        source = source.args[0]  # type: ignore[assignment]
    found = _counted(source)
    return None if found is None else _flattened(found, k)


def counts_rows(node: Node) -> bool:
    """Whether each value is its place along the first dim, wherever it stands along the others."""
    found = _counted(node)
    return found is not None and found.dims == 1


def divisor(node: Node) -> tuple[Node, int] | None:
    """The source and the number by which a node divides integers that are not negative, rounding down."""
    if node.target in (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode):
        source, k = node.args[:2]
        down = node.target is aten.floor_divide.default or bound(node)["rounding_mode"] in ("floor", "trunc")
        if isinstance(source, Node) and isinstance(k, int) and k > 0 and down:
            return source, k
    return None


def remainder(node: Node) -> tuple[Node, int] | None:
    """The same of what is left over."""
    if node.target in (aten.remainder.Scalar, aten.fmod.Scalar):
        source, k = node.args[:2]
        if isinstance(source, Node) and isinstance(k, int) and k > 0:
            return source, k
    return None


def _flattened(found: _Counted, k: int) -> Number | None:
    times = product(found.shape[found.dims :]) * k
    return Number(int(times)) if sympy.sympify(times).is_Integer else None


def _counted(node: object) -> _Counted | None:
    """What a node of any shape counts."""
    if not isinstance(node, Node) or node.op != "call_function" or "val" not in node.meta:
        return None
    shape = facts.shape(node.meta["val"]) if isinstance(node.meta["val"], torch.Tensor) else ()
    given = bound(node) if isinstance(node.target, torch._ops.OpOverload) else {}
    if getattr(node.target, "overloadpacket", None) is aten.arange:
        whole = given.get("start", 0) == 0 and given.get("step", 1) == 1
        return _Counted(shape, 1) if whole and node.meta["val"].dtype in NUMBERING else None
    before = _counted(node.args[0]) if node.args else None
    if before is None:
        return None
    if is_same(node) or (node.target is aten.slice.Tensor and shape == before.shape):
        return before if node.meta["val"].dtype in NUMBERING else None
    if node.target is aten.unsqueeze.default:
        return _Counted(shape, before.dims) if given["dim"] % len(shape) >= before.dims else None
    if node.target is aten.expand.default:
        same = len(shape) == len(before.shape) and shape[: before.dims] == before.shape[: before.dims]
        return _Counted(shape, before.dims) if same else None
    if is_reshaped(node) and shape[:1] == before.shape[:1] and before.dims == 1:
        return _Counted(shape, 1) if product(shape[1:]) == product(before.shape[1:]) else None
    return None
