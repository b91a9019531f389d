"""Values of pairs of rows, `[.., T, S]`: the scores of attention that is written out.

Entry (t, s) is computed from rows t and s alone.  It is of one sample if both are; where a softmax or a product sums
over s, the entries of two samples must be zero, which is checked at the call.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.finite import stays_finite
from psg_fx.graph.order import is_reshaped, is_same

from ..values import Op, Result
from .links import Kind, Link, row_axis

aten = torch.ops.aten

_MATMULS = (aten.matmul.default, aten.bmm.default, aten.mm.default)
_PRODUCTS = (*_MATMULS, aten.baddbmm.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
_BY_ENTRY = (aten.masked_fill, aten.where, aten.native_dropout, aten.dropout)
_QUOTIENTS = (aten.div, aten.divide, aten.true_divide, aten.floor_divide, aten.remainder, aten.fmod)
_WAYS = (
    "scores q @ k.transpose(-1, -2) may be scaled, masked by what is made of the ids, go through a softmax over their "
    "last dim and be multiplied with values; F.scaled_dot_product_attention does all of it"
)


def of_pairs(op: Op) -> tuple[Result, list[Link]] | None:
    """What is known of an op that makes pairs of rows, or computes with them; None for any other op."""
    pairs = [n for n in op.node.all_input_nodes if n in op.known and op.known[n].pairs]
    if not pairs:
        return _pooled(op) or _scores(op)
    target = op.node.target
    if target in _MATMULS:
        return _weighted(op)
    if target in _SOFTMAX:
        return _softmax(op, pairs[0])
    by_entry = torch.Tag.pointwise in getattr(target, "tags", ()) or is_same(op.node)
    by_entry = by_entry or _packet(op.node) in _BY_ENTRY
    seen_otherwise = is_reshaped(op.node) or target is aten.expand.default
    if by_entry and not _is_defined(op):
        raise op.unsupported(
            f"it may be no number where the rows of two samples meet in %{pairs[0].name}, and 0 times that is NaN",
            "mask what it is taken of, as in scores.masked_fill(~same, 1.0).sqrt()",
        )
    if (by_entry and all(_fits(op, n) for n in op.node.all_input_nodes)) or (seen_otherwise and _keeps(op, pairs[0])):
        return _pairs(op), []
    raise op.unsupported(f"%{pairs[0].name} has a value for each pair of rows, also those of two samples", _WAYS)


def _is_defined(op: Op) -> bool:
    """Whether a function and its derivative are numbers for pairs of rows of two samples: everywhere, or for the number
    that a mask has put there.
    """
    node, packet = op.node, _packet(op.node)
    if packet in _BY_ENTRY or is_same(node) or stays_finite(node):
        return True
    source, *rest = node.args
    if packet in _QUOTIENTS:
        divisor: Any = rest[0]
        own = isinstance(divisor, Node) and op.known[divisor].pairs
        return _filled(op, divisor) not in (None, 0) if own else isinstance(divisor, Node) or bool(divisor)
    exponent: Any = rest[0] if packet in (aten.pow, aten.float_power) and rest else None
    if isinstance(exponent, (int, float)) and exponent >= 0 and exponent == int(exponent):
        return True
    fill = _filled(op, source)
    if fill is None or any(isinstance(r, Node) for r in rest):
        return False
    x = torch.tensor(float(fill), dtype=torch.float64, requires_grad=True)
    y = packet(x, *rest, **node.kwargs)
    return bool(y.isfinite()) and bool(torch.autograd.grad(y, x)[0].isfinite())


def _filled(op: Op, pairs: Any) -> int | float | None:
    """The number that a mask has put where the rows of two samples meet."""
    while isinstance(pairs, Node) and (is_same(pairs) or is_reshaped(pairs)):
        pairs = pairs.args[0]
    if getattr(pairs, "target", None) is not aten.masked_fill.Scalar:
        return None
    _, mask, fill = pairs.args
    return fill if isinstance(fill, (int, float)) and _is_mask(op, mask, pairs) else None


def _pairs(op: Op) -> Result:
    values = op.node.meta["val"]
    if isinstance(values, torch.Tensor):
        return Result(SampleAxis(values.ndim - 2), pairs=True)
    return Result(tuple(SampleAxis(v.ndim - 2) for v in values), pairs=True)


def _is_plain(op: Op, node: Node) -> bool:
    """Whether a value is rows, and neither pairs nor structure."""
    return not (op.known[node].pairs or op.known[node].structure or op.known[node].index)


def _scores(op: Op) -> tuple[Result, list[Link]] | None:
    """p[.., t, s] = Σ_d q[.., t, d] k[.., d, s] (+ mask[.., t, s])"""
    if op.node.target not in _PRODUCTS:
        return None
    added = op.args.get("self") if op.node.target is aten.baddbmm.default else None
    left, right = op.node.args[1:3] if added is not None else op.node.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    q, k = row_axis(op, left), row_axis(op, right)
    if q is None or k is None or not (_is_plain(op, left) and _is_plain(op, right)):
        return None
    if q[0].dim != left.meta["val"].ndim - 2 or k[0].dim != right.meta["val"].ndim - 1:
        return None
    if isinstance(added, Node) and not (op.known[added].structure or op.known[added].axes is None):
        return None
    return _pairs(op), []


def _weighted(op: Op) -> tuple[Result, list[Link]]:
    """y[.., t, :] = Σ_s p[.., t, s] v[.., s, :]"""
    weights, values = op.node.args[:2]
    assert isinstance(weights, Node)
    assert isinstance(values, Node)
    v = row_axis(op, values)
    mask = _zeros_of(op, weights)
    if not op.known[weights].pairs or v is None or not _is_plain(op, values) or v[0].dim != values.meta["val"].ndim - 2:
        raise op.unsupported(f"%{weights.name} has a value for each pair of rows", _WAYS)
    if mask is None:
        raise op.unsupported(
            f"%{weights.name} has a weight for each pair of rows, and no mask of the ids makes it 0 for two samples",
            _WAYS,
        )
    return Result(SampleAxis(op.node.meta["val"].ndim - 2)), [_closed(op, *mask)]


def _pooled(op: Op) -> tuple[Result, list[Link]] | None:
    """y[.., t, :] = Σ_s m[.., t, s] v[.., s, :], of a mask made of ids and the order of rows alone."""
    if op.node.target not in _MATMULS:
        return None
    mask, values = op.node.args[:2]
    assert isinstance(mask, Node)
    assert isinstance(values, Node)
    v = row_axis(op, values)
    if not op.known[mask].structure or mask.meta["val"].ndim < 2 or v is None or not _is_plain(op, values):
        return None
    *_, own, other = facts.shape(mask.meta["val"])
    if v[0].dim != values.meta["val"].ndim - 2 or other != v[1] or not isinstance(own, sympy.Symbol):
        return None
    return Result(SampleAxis(op.node.meta["val"].ndim - 2)), [_closed(op, mask)]


def _zeros_of(op: Op, weights: Node) -> tuple[Node, Kind] | None:
    """What says which weights are 0 and have no gradient: what a softmax returns, or a mask that they are multiplied or
    filled by.  A weight that is 0 otherwise, as of projections that begin with zeros, has one.
    """
    node: Any = weights
    while isinstance(node, Node) and op.known[node].pairs:
        packet = _packet(node)
        if node.target in _SOFTMAX:
            return node, "weights"
        masks = [n for n in node.all_input_nodes if _is_mask(op, n, node)]
        behind = next((n for n in node.all_input_nodes if op.known[n].pairs), None)
        if packet is aten.mul and masks and behind is not None and (found := _zeros_of(op, behind)) is not None:
            return found
        if packet in (aten.mul, aten.where, aten.masked_fill) and masks:
            filled = node.args[2] if packet is not aten.mul else 0
            return (masks[0], "filled" if packet is aten.masked_fill else "weights") if _is_zero(filled) else None
        rest = [n for n in node.all_input_nodes if n is not node.args[0] and op.known[n].pairs]
        if rest or not (packet in _KEEP_ZEROS or is_same(node) or is_reshaped(node) or node.target is operator.getitem):
            return None
        node = node.args[0]
    return None


_KEEP_ZEROS = (aten.mul, aten.div, aten.neg, aten.expand, aten.native_dropout, aten.dropout, aten.relu)


def _is_mask(op: Op, node: Node, pairs: Node) -> bool:
    """Whether it is structure with an entry for each pair."""
    value, shape = node.meta.get("val"), facts.shape(pairs.meta["val"])[-2:]
    return isinstance(value, torch.Tensor) and op.known[node].structure and facts.shape(value)[-2:] == shape


def _is_zero(value: object) -> bool:
    """Whether it is the number 0, or a tensor made of it."""
    if isinstance(value, Node):
        fill = value.args[0] if value.target is aten.scalar_tensor.default else None
        fill = value.args[1] if _packet(value) in (aten.full, aten.full_like) else fill
        return value.target is aten.zeros_like.default or _is_zero(fill)
    return isinstance(value, (int, float)) and value == 0


def _softmax(op: Op, scores: Node) -> tuple[Result, list[Link]]:
    """Over s."""
    if op.dim("dim", scores.meta["val"].ndim) != scores.meta["val"].ndim - 1:
        raise op.refuse("its sum runs over the rows that attend, those of all samples", _WAYS)
    return _pairs(op), [_closed(op, op.node)]


def _closed(op: Op, weights: Node, kind: Kind = "weights") -> Link:
    own, other = facts.shape(weights.meta["val"])[-2:]
    return Link(kind, op.node, weights, weights.meta["val"].ndim - 2, own, other)


def _fits(op: Op, node: Node) -> bool:
    """Whether an input of an op by entries has one for each pair, or for each row of the pair, or for all."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not any(s.free_symbols for s in facts.shape(value)):
        return not isinstance(value, (torch.SymInt, torch.SymFloat))
    if op.known[node].pairs or op.known[node].structure:
        return all(not s.free_symbols for s in facts.shape(value)[:-2])
    axis = row_axis(op, node)
    return axis is not None and axis[0].dim in (value.ndim - 2, value.ndim - 1) and _is_plain(op, node)


def _keeps(op: Op, pairs: Node) -> bool:
    """Whether a view leaves the last two dims as they are."""
    return facts.shape(pairs.meta["val"])[-2:] == facts.shape(op.node.meta["val"])[-2:]


def _packet(node: Node) -> Any:
    """The op, whatever its overload."""
    return getattr(node.target, "overloadpacket", None)


__all__ = ["of_pairs"]
