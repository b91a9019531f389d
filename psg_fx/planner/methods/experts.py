"""Contractions with `onehot(ids)[b,t,e] x[b,t,i]`, rows of which each belongs to one expert, or with
`onehot(ids)[r,b] x[r,i]`, to one sample: the ids tell rows apart, and products run over the own rows of each
(`psg_fx/ops/experts.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from psg_fx.algebra.network import BATCH, Axes, Form, Members, OneHot, Routed, TileSums
from psg_fx.ops.experts import expert_mm, expert_outer, expert_squares
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods.base import Method, Pair, arrange, least
from psg_fx.tensors import Size, accumulation_dtype

_CALLS = 4
"""Kernels that bring rows in order."""


class Route(Method):
    """onehot(ids)[b,t,e] x[b,t,i] as it is: x beside its ids, nothing computed."""

    name = "route"
    own_op = True
    members = False

    def applies(self, p: Pair) -> bool:
        hot, other = p.apart(OneHot)
        return (
            isinstance(hot.form, OneHot) and isinstance(hot.form, Members) == self.members
            and other.dense and set(hot.axes[:-1]) <= set(other.axes) and hot.axes[-1] not in other.axes
            and len(other.axes) > len(hot.axes) - 1 and set(p.everything) == set(p.out)
        )  # fmt: skip

    def out(self, p: Pair) -> Axes:
        hot, other = p.apart(OneHot)
        return (*hot.axes, *(x for x in other.axes if x not in hot.axes))

    def form(self, p: Pair) -> Form:
        hot, _ = p.apart(OneHot)
        assert isinstance(hot.form, OneHot)
        return Routed(hot.form.classes, len(hot.axes), self.members)

    def bytes(self, p: Pair) -> Size:
        return 0

    def work(self, p: Pair) -> Work:
        return Work(0, 0, 0, calls=0)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        ids, x, have = (a, b, p.b.axes) if isinstance(p.a.form, OneHot) else (b, a, p.a.axes)
        lead = self.out(p)[: ids.ndim]
        rest = tuple(q for q in have if q not in lead)
        return arrange(x, have, tuple((q,) for q in (*lead, *rest))), ids


class RouteMembers(Route):
    """onehot(ids)[r,b] x[r,i], rows and what they belong to, in the same way.  Products then wait for how many rows
    each sample has, which no step on a device does.
    """

    members = True
    devices = ("cpu",)


class _OfExperts(Method):
    """Products of routed rows with another operand.  flops = 2 · rows · i · o; rows are brought in order first."""

    own_op = True

    def axes(self, p: Pair) -> tuple[Axes, str, Axes]:
        """(b, t..), e and i of the routed operand."""
        routed, _ = p.apart(Routed)
        assert isinstance(routed.form, Routed)
        return routed.axes[: routed.form.lead - 1], routed.axes[routed.form.lead - 1], routed.axes[routed.form.lead :]

    def operands(self, p: Pair, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Axes]:
        """x `[b, t.., i..]`, its ids `[b, t..]`, the other, and its axes."""
        first = isinstance(p.a.form, Routed)
        (x, ids), other = (a, b) if first else (b, a)
        return x, ids, other, (p.b if first else p.a).axes

    def applies(self, p: Pair) -> bool:
        routed, other = p.apart(Routed)
        return isinstance(routed.form, Routed) and other.dense and self.fits(p, *self.axes(p), other.axes)

    def fits(self, p: Pair, lead: Axes, expert: str, inputs: Axes, other: Axes) -> bool:
        raise NotImplementedError

    def products(self, p: Pair) -> Size:
        """How many products of matrices there are."""
        raise NotImplementedError

    def work(self, p: Pair) -> Work:
        lead, expert, inputs = self.axes(p)
        rows, (_, other) = p.count(lead), p.apart(Routed)
        flops = 2 * rows * p.count(inputs) * p.count(tuple(x for x in other.axes if x not in (*lead, expert, *inputs)))
        return self.of_rows(p, flops, p.bytes((*lead, *inputs)) + p.bytes(other.axes), p.bytes(p.out))

    def of_rows(self, p: Pair, flops: Size, read: Size, written: Size) -> Work:
        """The work of products whose operands are brought in order first; rows of samples mostly lie so."""
        routed, _ = p.apart(Routed)
        assert isinstance(routed.form, Routed)
        moved = read if routed.form.members else 3 * read
        return Work(flops, moved, written, "gemm", _CALLS)

    def seconds(self, p: Pair, device: Device) -> float:
        each = device.extra.get("product", device.launch)
        return device.seconds(self.work(p), p.dtype) + float(self.products(p)) * each


class ExpertOuter(_OfExperts):
    """out[e,i,o] = Σ_r onehot(ids)[r,e] x[r,i] y[r,o], of each sample or of all: each expert's own rows.  Positions
    that both operands have beside, and that are summed, are further rows.
    """

    name = "segment-matmul"

    def roles(self, p: Pair) -> tuple[Axes, str, Axes, Axes]:
        """The rows, e, i and o."""
        lead, expert, inputs = self.axes(p)
        _, other = p.apart(Routed)
        shared = tuple(x for x in inputs if x in other.axes and x not in p.out)
        rows = (*lead, *shared)
        return rows, expert, tuple(x for x in inputs if x not in rows), tuple(x for x in other.axes if x not in rows)

    def fits(self, p: Pair, lead: Axes, expert: str, inputs: Axes, other: Axes) -> bool:
        _, _, i, o = self.roles(p)
        kept = {expert, *i, *o}
        return (
            set(lead) <= set(other) and expert not in other and not set(i) & set(o) and bool(i) and bool(o)
            and set(p.out) in (kept, kept | {BATCH})
        )  # fmt: skip

    def out(self, p: Pair) -> Axes:
        rows, expert, i, o = self.roles(p)
        return (*(x for x in rows[:1] if x in p.out), expert, *i, *o)

    def products(self, p: Pair) -> Size:
        rows, expert, _, _ = self.roles(p)
        return p.sizes[expert] * (p.sizes[rows[0]] if rows[0] in p.out else 1)

    def emit(self, p: Pair, a: Any, b: Any) -> torch.Tensor:
        x, y, ids, count = self.flat(p, a, b)
        rows, expert, i, o = self.roles(p)
        each = [-1, p.sizes[expert]] if rows[0] in p.out else [-1]
        found: torch.Tensor = expert_outer(x, y, ids, count)
        return found.reshape(*each, *(p.sizes[q] for q in (*i, *o)))

    def flat(self, p: Pair, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Rows of both `[r, i]`, `[r, o]`, and which of how many products each row is part of."""
        x, ids, other, have = self.operands(p, a, b)
        routed, _ = p.apart(Routed)
        assert isinstance(routed.form, Routed)
        rows, expert, i, o = self.roles(p)
        of_x = tuple(q for q in routed.axes if q != expert)
        count = routed.form.classes
        if rows[0] in p.out:
            ids = ids + count * torch.arange(ids.shape[0], device=ids.device).reshape(-1, *[1] * (ids.ndim - 1))
            count = ids.shape[0] * count
        for q in rows[ids.ndim :]:
            ids = ids.unsqueeze(-1).expand(*ids.shape, p.sizes[q])
        dtype = torch.promote_types(x.dtype, other.dtype)
        x, y = arrange(x, of_x, (rows, i)), arrange(other, have, (rows, o))
        return x.to(dtype), y.to(dtype), ids.reshape(-1), count


class ExpertSquares(ExpertOuter):
    """Σ_{i,o} out[b,e,i,o]² for each sample and expert, and nothing else. Of few rows by Gram matrices:
    2·n²·(i + o) flops for n rows instead of 2·n·i·o.
    """

    name = "segment-squares"

    def fits(self, p: Pair, lead: Axes, expert: str, inputs: Axes, other: Axes) -> bool:
        return super().fits(p, lead, expert, inputs, other) and BATCH in (lead[0], expert) and BATCH in p.out

    def form(self, p: Pair) -> Form:
        return TileSums()

    def bytes(self, p: Pair) -> Size:
        return self.products(p) * accumulation_dtype(p.dtype).itemsize

    def work(self, p: Pair) -> Work:
        rows, _, inputs, outputs = self.roles(p)
        i, o = p.count(inputs), p.count(outputs)
        read = p.bytes((*rows, *inputs)) + p.bytes((*rows, *outputs))
        fewer = least(p.count(rows) / self.products(p) * (i + o), i * o)
        return self.of_rows(p, 2 * p.count(rows) * fewer, read, self.bytes(p))

    def seconds(self, p: Pair, device: Device) -> float:
        return super().seconds(p, device) + 4 * float(self.products(p)) * device.launch

    def emit(self, p: Pair, a: Any, b: Any) -> torch.Tensor:
        x, y, ids, count = self.flat(p, a, b)
        rows, expert, _, _ = self.roles(p)
        found: torch.Tensor = expert_squares(x, y, ids, count)
        return found.reshape(-1, p.sizes[expert] if rows[0] in p.out else 1)


class ExpertMatMul(_OfExperts):
    """out[b,t,o] = Σ_{e,i} onehot(ids)[b,t,e] x[b,t,i] v[e,i,o]: a direction v pushed through the experts."""

    name = "segment-linear"

    def fits(self, p: Pair, lead: Axes, expert: str, inputs: Axes, other: Axes) -> bool:
        rest = [x for x in other if x not in (expert, *inputs)]
        return (
            {expert, *inputs} <= set(other) and not set(lead) & set(other) and set(p.out) == {*lead, *rest}
        )  # fmt: skip

    def out(self, p: Pair) -> Axes:
        lead, expert, inputs = self.axes(p)
        _, other = p.apart(Routed)
        return (*lead, *(x for x in other.axes if x not in (expert, *inputs)))

    def products(self, p: Pair) -> Size:
        return p.sizes[self.axes(p)[1]]

    def emit(self, p: Pair, a: Any, b: Any) -> torch.Tensor:
        x, ids, other, have = self.operands(p, a, b)
        _, expert, inputs = self.axes(p)
        rest = tuple(q for q in have if q not in (expert, *inputs))
        w = arrange(other, have, ((expert,), inputs, rest))
        tail = [other.shape[have.index(q)] for q in rest]
        dtype = torch.promote_types(x.dtype, w.dtype)
        found = expert_mm(x.reshape(ids.numel(), -1).to(dtype), w.to(dtype), ids.reshape(-1))
        made: torch.Tensor = found.reshape(*ids.shape, *tail)
        return made
