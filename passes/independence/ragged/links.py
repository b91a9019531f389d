"""Ops between axes of rows: a row is joined with those that it points to, which must be of its own sample.

A *pointer* p [T] of rows of one axis into another, S, is an integer tensor.  `x[p]` gives rows of T, and
`index_add(0, p, y)` adds rows of T to those of S that they point to.  Both keep samples apart if and only if
ids_S[p[t]] == ids_T[t], where the ids of samples themselves are 0..B-1.  Shapes do not show this, so values must: it
becomes a condition that is checked at every call, unless p is the ids of T, and S the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.order import is_reshaped, is_same
from psg_fx.ops.last_rows import last_rows

from ..values import NUMBERING, Op, Result

aten = torch.ops.aten

Kind = Literal["pointer", "mask", "weights", "filled", "order"]


@dataclass(frozen=True)
class Link:
    """Rows that an op joins.

    kind: by a pointer, by an attention mask, by weights of pairs of rows, or where a mask does not fill these with 0;
    "order": none, but the op needs the rows of `own` in the order of their samples.
    node: the op.  by: the pointer, mask or weights, `dim` of it the rows of `own` (of masks and weights: the last two
    dims are rows of `own` and of `other`).
    own, other: the symbols of the numbers of rows of both axes.  counts_back: a negative pointer counts from the end.
    """

    kind: Kind
    node: Node
    by: Node
    dim: int
    own: sympy.Symbol
    other: sympy.Symbol
    counts_back: bool = False


def symbol(node: Node, axis: SampleAxis) -> sympy.Symbol | None:
    """The number of rows, or of samples, that lie in an axis of a value; None if it holds anything beside them."""
    size = facts.shape(node.meta["val"])[axis.dim]
    return size if isinstance(size, sympy.Symbol) else None


def pointing(op: Op) -> tuple[Result, list[Link]] | None:
    """What an op gives that joins rows by a pointer, and what must hold for that; None for any other op."""
    target: Any = op.node.target
    found = READS.get(target) or WRITES.get(target)
    return None if found is None else found(op)


def row_axis(op: Op, node: Any) -> tuple[SampleAxis, sympy.Symbol] | None:
    """Where the rows of an argument lie, and how many these are."""
    known = op.known.get(node) if isinstance(node, Node) else None
    if known is None or not isinstance(known.axes, SampleAxis):
        return None
    count = symbol(node, known.axes)
    return None if count is None else (known.axes, count)


def _link(op: Op, pointer: Node, x: tuple[SampleAxis, sympy.Symbol]) -> Link | None:
    own = row_axis(op, pointer)
    if own is None or pointer.meta["val"].dtype not in NUMBERING:
        return None
    root, axis = pointer, own[0]
    while _same_numbers(root) and (above := row_axis(op, root.args[0])) and above[1] == own[1]:
        if root.args[0].meta["val"].dtype not in NUMBERING:  # type: ignore[union-attr]
            break
        root, axis = root.args[0], above[0]  # type: ignore[assignment]
    back = op.node.target in _COUNTING_BACK and not op.known[root].structure  # alone, the end is another one
    return Link("pointer", op.node, root, axis.dim, own[1], x[1], back)


def _same_numbers(node: Node) -> bool:
    """Whether a pointer holds, for each row, the number that its first argument has; reshaped, it may have other dims
    of size 1.
    """
    if not is_reshaped(node):
        return is_same(node) or node.target is aten.expand.default
    before, after = ([s for s in facts.shape(n.meta["val"]) if s != 1] for n in (node.args[0], node))  # type: ignore[union-attr]
    return before == after


def _index(op: Op) -> tuple[Result, list[Link]] | None:
    """y[.., t.., ..] = x[.., p[t..], ..]"""
    x, picks = op.args["self"], list(op.raw("indices", []))
    source, used = row_axis(op, x), [d for d, pick in enumerate(picks) if pick is not None]
    if source is None or used != [source[0].dim]:
        return None
    return _picked(op, picks[used[0]], source, x)


def _picked(
    op: Op, pointer: Node, source: tuple[SampleAxis, sympy.Symbol], x: Node
) -> tuple[Result, list[Link]] | None:
    link, own = _link(op, pointer, source), row_axis(op, pointer)
    if link is None or own is None:
        return None
    return Result(SampleAxis(source[0].dim + own[0].dim), structure=_is_about(op, x)), [link]


def _index_select(op: Op) -> tuple[Result, list[Link]] | None:
    """y[.., t, ..] = x[.., p[t], ..]"""
    x = op.args["self"]
    source = row_axis(op, x)
    if source is None or source[0].dim != op.dim("dim", x.meta["val"].ndim):
        return None
    return _picked(op, op.args["index"], source, x)


def _gather(op: Op) -> tuple[Result, list[Link]] | None:
    """y[.., t, k..] = x[.., p[.., t, k..], k..]"""
    x, pointer = op.args["self"], op.args["index"]
    source, own = row_axis(op, x), row_axis(op, pointer)
    if source is None or own is None or not own[0].dim == source[0].dim == op.dim("dim", x.meta["val"].ndim):
        return None
    link = _link(op, pointer, source)
    return None if link is None else (Result(own[0], structure=_is_about(op, x)), [link])


def _write(op: Op) -> tuple[Result, list[Link]] | None:
    """Y = x with y[.., p[t], ..] = (or +=) src[.., t, ..]; of scatter, p has as many dims as x."""
    x, pointer = op.args["self"], op.args["index"]
    target, own = row_axis(op, x), row_axis(op, pointer)
    dim = op.dim("dim", x.meta["val"].ndim)
    if target is None or own is None or target[0].dim != dim:
        return None
    values = next((op.args[name] for name in ("src", "source", "value") if name in op.args), None)
    given = row_axis(op, values)
    if isinstance(values, Node) and (given is None or (given[0].dim, given[1]) != (dim, own[1])):
        return None
    link = _link(op, pointer, target)
    return None if link is None or _numbers(op, x, values) else (Result(target[0]), [link])


def _put(op: Op) -> tuple[Result, list[Link]] | None:
    """Y = x with x[.., p[t..], ..] = (or +=) values."""
    x, picks, values = op.args["self"], list(op.raw("indices", [])), op.args["values"]
    target, used = row_axis(op, x), [d for d, pick in enumerate(picks) if pick is not None]
    if target is None or used != [target[0].dim]:
        return None
    pointer = picks[used[0]]
    own, link = row_axis(op, pointer), _link(op, pointer, target)
    if own is None or link is None or _numbers(op, x, values):
        return None
    width = x.meta["val"].ndim - 1 + pointer.meta["val"].ndim
    known, given = op.known.get(values), row_axis(op, values)
    if known is None or known.axes is None:
        return Result(target[0]), [link]
    place = target[0].dim + own[0].dim
    fits = given is not None and given[0].dim + width - values.meta["val"].ndim == place and given[1] == own[1]
    return (Result(target[0]), [link]) if fits else None


def _last(op: Op) -> tuple[Result, list[Link]] | None:
    """Of row t whether it is the last one with its p[t]: those it is compared with must be rows of its own sample."""
    onto, pointer, kept, dim = op.args["onto"], op.args["index"], op.args["kept"], op.raw("dim", 0)
    target, own = row_axis(op, onto), row_axis(op, pointer)
    if target is None or own is None or target[0].dim != dim or own[0].dim != min(dim, pointer.meta["val"].ndim - 1):
        return None
    if kept is not None and (row_axis(op, kept) != own or _is_about(op, kept)):
        return None
    link = _link(op, pointer, target)
    return None if link is None else (Result(own[0]), [link])


def _is_about(op: Op, node: Node) -> bool:
    """Whether a value holds numbers of samples or of rows."""
    return op.known[node].structure or bool(op.known[node].index)


def _numbers(op: Op, *nodes: Any) -> bool:
    """Whether what is written is numbers of samples or of rows."""
    return any(_is_about(op, n) for n in nodes if isinstance(n, Node) and n in op.known)


_COUNTING_BACK = (
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default, last_rows,
)  # fmt: skip
READS = {
    aten.index.Tensor: _index, aten._unsafe_index.Tensor: _index, aten.index_select.default: _index_select,
    aten.gather.default: _gather, last_rows: _last,
}  # fmt: skip
WRITES = {
    **dict.fromkeys((aten.index_add.default, aten.index_reduce.default, aten.index_copy.default), _write),
    **dict.fromkeys((aten.scatter_add.default, aten.scatter_reduce.two, aten.scatter.src, aten.scatter.reduce), _write),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), _put),
}


def attending(op: Op) -> tuple[Result, list[Link]] | None:
    """Attention between rows: y[.., t, :] = Σ_s softmax_s(q[.., t, :]·k[.., s, :] + mask[.., t, s]) v[.., s, :].

    It keeps samples apart if the mask is closed wherever ids_T[t] != ids_S[s].  None for attention within samples.
    """
    if op.node.target is not aten.scaled_dot_product_attention.default:
        return None
    q, k, v = (op.args[name] for name in ("query", "key", "value"))
    axes = [row_axis(op, n) for n in (q, k, v)]
    ndim = q.meta["val"].ndim
    if any(a is None or a[0].dim != n.meta["val"].ndim - 2 for a, n in zip(axes, (q, k, v), strict=True)):
        return None
    mask, (own, other) = op.args.get("attn_mask"), (axes[0][1], axes[1][1])  # type: ignore[index]
    if not isinstance(mask, Node) or op.raw("is_causal", False):
        raise op.refuse(
            "its rows attend to those of all samples",
            "give it a mask made of the ids: (ids[:, None] == ids[None, :]) & ..., with is_causal=False",
        )
    shape = facts.shape(mask.meta["val"])
    known = op.known[mask]
    if not known.structure or len(shape) < 2 or tuple(shape[-2:]) != (own, other):
        raise op.unsupported(
            "its mask is not made of the ids of the rows alone",
            "make the mask of ids and positions in the order of rows: (ids[:, None] == ids[None, :]) & "
            "torch.ones(R, R, dtype=torch.bool).tril()",
        )
    link = Link("mask", op.node, mask, len(shape) - 2, own, other)
    return Result(SampleAxis(ndim - 2)), [link]
