"""Contractions with `onehot(ids)[b, t, v]`, which is never built: equality, gather and scatter take its place."""

from __future__ import annotations

import torch

from psg_fx.algebra.network import Axes, Members, OneHot
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods.base import Arg, Method, Pair, expand_to, least


def _operands(p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[Arg, torch.Tensor, torch.Tensor, Axes]:
    """The one-hot operand and its ids, the other one and its axes."""
    hot, other = p.apart(OneHot)
    return (hot, a, b, other.axes) if hot is p.a else (hot, b, a, other.axes)


class Equal(Method):
    """Σ_v onehot(ids)[b,t,v] onehot(ids')[b,s,v] = [ids[b,t] == ids'[b,s]]."""

    name = "equal"

    def applies(self, p: Pair) -> bool:
        if not (isinstance(p.a.form, OneHot) and isinstance(p.b.form, OneHot)):
            return False
        return p.a.axes[-1] == p.b.axes[-1] and p.a.axes[-1] not in p.out and self.out(p) == _kept(p)

    def out(self, p: Pair) -> Axes:
        return tuple(dict.fromkeys(p.a.axes[:-1] + p.b.axes[:-1]))

    def work(self, p: Pair) -> Work:
        out = self.out(p)
        ids = p.count(p.a.axes[:-1]) + p.count(p.b.axes[:-1])  # eight bytes each
        return Work(p.count(out), 8 * ids, p.bytes(out))

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = self.out(p)
        return (expand_to(a, p.a.axes[:-1], out) == expand_to(b, p.b.axes[:-1], out)).to(p.dtype)


class Gather(Method):
    """Σ_v onehot(ids)[b,t,v] a[b,v,r..] = a[b, ids[b,t], r..]; a may be the same for all samples."""

    name = "gather"

    def applies(self, p: Pair) -> bool:
        hot, other = p.apart(OneHot)
        if not isinstance(hot.form, OneHot) or not other.dense:
            return False
        b, v = hot.axes[0], hot.axes[-1]
        if isinstance(hot.form, Members) and b in other.axes:
            return False
        shared = set(hot.axes[:-1]) & set(other.axes)  # none: one table for all samples
        return v in other.axes and (b in shared or not shared) and v not in p.out and self.out(p) == _kept(p)

    def out(self, p: Pair) -> Axes:
        hot, other = p.apart(OneHot)
        return hot.axes[:-1] + tuple(x for x in other.axes if x not in hot.axes)

    def work(self, p: Pair) -> Work:
        out = self.out(p)
        return Work(p.count(out), p.bytes(out), p.bytes(out))

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hot, ids, other, have = _operands(p, a, b)
        axes = hot.axes
        shared = tuple(x for x in axes[:-1] if x in have)
        rest = tuple(x for x in have if x not in axes)
        table = other.permute([have.index(x) for x in (*shared, axes[-1], *rest)])
        if not shared:
            return table[_valid(ids, hot)]
        if shared != axes[:1]:  # the table depends on t too: pick along v, elementwise in t
            index = expand_to(ids, axes[:-1], (*axes, *rest))
            index = index.expand(*ids.shape, 1, *table.shape[len(shared) + 1 :])
            return table.expand(*ids.shape, *table.shape[len(shared) :]).gather(ids.ndim, index).squeeze(ids.ndim)
        rows = torch.arange(table.shape[0], device=table.device).reshape(-1, *[1] * (ids.ndim - 1))
        return table[rows, ids]


class Scatter(Method):
    """Σ_t onehot(ids)[b,t,v] a[b,t,d..] -> out[b,v,d..]; the samples are summed too where b is not kept.

    bytes: the zeroed table and the rows, with one read-modify-write for each place; met again, it is in the cache.
    """

    name = "scatter"

    def applies(self, p: Pair) -> bool:
        hot, other = p.apart(OneHot)
        axes = hot.axes
        if not isinstance(hot.form, OneHot) or not other.dense or axes[-1] in other.axes or axes[-1] not in p.out:
            return False
        if isinstance(hot.form, Members) and axes[0] in p.out:
            return False
        gone = [x for x in axes[:-1] if x not in p.out]
        kept = [x for x in other.axes if x not in axes]
        return (
            axes[0] in other.axes and all(x in p.out for x in kept)
            and (gone == list(axes[1:-1]) or gone == list(axes[:-1]))
        )  # fmt: skip

    def out(self, p: Pair) -> Axes:
        hot, other = p.apart(OneHot)
        lead = hot.axes[:1] if hot.axes[0] in p.out else ()
        return (*lead, hot.axes[-1], *(x for x in other.axes if x not in hot.axes))

    def work(self, p: Pair) -> Work:
        _, other = p.apart(OneHot)
        table, rows = p.bytes(self.out(p)), p.bytes(other.axes)
        places = least(table, rows)
        return Work(p.count(other.axes), rows + places, table + places, "pointwise", 5)

    def seconds(self, p: Pair, device: Device) -> float:
        _, other = p.apart(OneHot)
        places = least(p.count(other.axes), p.count(self.out(p)))
        return device.seconds(self.work(p), p.dtype) + float(places) * device.extra["scatter"]

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hot, ids, other, have = _operands(p, a, b)
        assert isinstance(hot.form, OneHot)
        axes, rest = hot.axes, tuple(x for x in have if x not in hot.axes)
        ids = _valid(ids, hot)
        values = expand_to(other, have, axes[:-1] + rest)
        values = values.expand(*ids.shape, *values.shape[ids.ndim :])
        classes, tail = hot.form.classes, values.shape[ids.ndim :]
        if axes[0] in p.out:
            offset = torch.arange(ids.shape[0], device=ids.device).reshape(-1, *[1] * (ids.ndim - 1)) * classes
            table = values.new_zeros((ids.shape[0] * classes, *tail))
            table = table.index_add(0, (ids + offset).reshape(-1), values.reshape(-1, *tail))
            return table.reshape(ids.shape[0], classes, *tail)
        return values.new_zeros((classes, *tail)).index_add(0, ids.reshape(-1), values.reshape(-1, *tail))


class Pick(Method):
    """Σ_r onehot(ids)[r,b] a[b,r,d..] -> out[b,d..]: of every row the part of its own group, summed by groups."""

    name = "pick"

    def applies(self, p: Pair) -> bool:
        hot, other = p.apart(OneHot)
        if not isinstance(hot.form, Members) or not other.dense or not {*hot.axes} <= {*other.axes}:
            return False
        return hot.axes[0] not in p.out and set(p.out) == set(self.out(p))

    def out(self, p: Pair) -> Axes:
        hot, other = p.apart(OneHot)
        return (hot.axes[1], *(x for x in other.axes if x not in hot.axes))

    def work(self, p: Pair) -> Work:
        hot, _ = p.apart(OneHot)
        rows = p.count(hot.axes[:1]) * p.count(self.out(p)[1:]) * p.dtype.itemsize
        return Work(p.count(self.out(p)), 3 * rows, rows + p.bytes(self.out(p)), "pointwise", 4)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hot, ids, other, have = _operands(p, a, b)
        assert isinstance(hot.form, Members)
        rest = tuple(x for x in have if x not in hot.axes)
        ids, table = _valid(ids, hot), other.permute([have.index(x) for x in (*hot.axes, *rest)])
        own = table[torch.arange(ids.shape[0], device=ids.device), ids]
        return own.new_zeros((hot.form.classes, *own.shape[1:])).index_add(0, ids, own)


def _valid(ids: torch.Tensor, hot: Arg) -> torch.Tensor:
    """Numbers of rows; those of no group, whose values are zero, count as of the first one."""
    return ids.clamp(min=0) if isinstance(hot.form, Members) else ids


def _kept(p: Pair) -> Axes:
    """The result's axes if exactly the class axis is summed, in the order of first occurrence."""
    hot, other = p.apart(OneHot)
    order = hot.axes[:-1] + tuple(x for x in other.axes if x not in hot.axes)
    return tuple(x for x in order if x in p.out)


def densify(ids: torch.Tensor, form: OneHot, dtype: torch.dtype) -> torch.Tensor:
    """onehot(ids)[b, t, v] as a tensor: the last resort."""
    return (ids.unsqueeze(-1) == torch.arange(form.classes, device=ids.device)).to(dtype)
