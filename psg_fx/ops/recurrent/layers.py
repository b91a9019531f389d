"""Recurrent layers as ops with the loop over time inside, so that a graph is as long for 10 steps as for 1000.

    h_t = cell(x_t, a_t, h_{t-1}),  a_t = W h_{t-1} + b        x: the gates' part from the input, over all T at once

`lstm`, `gru` and `rnn` run the loop and know no gradient.  With the states known, a is one linear layer over all T, and
`attach` gives the states their gradient with respect to x and to a, each through all later steps.  So W meets data in
one ordinary op, and the cotangent of its output is that of every use of W.

All tensors are `[T, B, ..]`, states `[B, ..]`.  Backward, the loop has one product with W and a few elementwise ops per
step; whatever does not depend on later steps is elementwise over all T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import Function

from psg_fx.op_table import under_autograd
from psg_fx.ops.define import define_op
from psg_fx.ops.recurrent import of_torch as of_torch

Maybe = Tensor | None
_NONLINEAR = {"tanh": torch.tanh_, "relu": torch.relu_}


@dataclass(frozen=True)
class Loop:
    """What computes an op with a loop, and what it returns, without values."""

    run: Callable[..., Any]
    shapes: Callable[..., Any]


LOOPS: dict[OpOverload, Loop] = {}
"""The ops with a loop."""


def _define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any], of_torch: Callable[..., Any]) -> Any:
    op = define_op(schema, run, shapes, of_torch)
    LOOPS[op] = Loop(run, shapes)
    return op


def sum_of(x: Tensor, bias: Maybe) -> Tensor:
    """`x + bias`, row-major in memory of its own."""
    made = x.new_empty(x.shape)
    return made.copy_(x) if bias is None else torch.add(x, bias, out=made)


def _shifted(first: Tensor, states: Tensor) -> Tensor:
    """The states before each step."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


# --- forward ----------------------------------------------------------------------------------------------------------


def _lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Maybe, projection: Maybe) -> tuple[Tensor, ...]:
    """I, f, o = σ(x + a), g = tanh(x + a); c' = f c + i g; h' = o tanh(c'), times the projection.

    All h', the gates i f g o side by side, all c' and their tanh.
    """
    gates, size = sum_of(x, bias), w.shape[0] // 4
    hidden, cells, squashed = (x.new_empty((*x.shape[:2], n)) for n in (h.shape[-1], size, size))
    steps = (*(part.unbind(0) for part in (gates, *gates.split(size, -1), gates[..., : 2 * size])), hidden, cells)
    for both, i, f, g, o, i_and_f, h_new, c_new, tanh in zip(*steps, squashed, strict=True):
        both.addmm_(h, w.t())
        i_and_f.sigmoid_()
        c = torch.mul(f, c, out=c_new).addcmul_(i, g.tanh_())
        torch.tanh(c, out=tanh)
        o.sigmoid_()
        h = torch.mul(o, tanh, out=h_new) if projection is None else torch.mm(o * tanh, projection.t(), out=h_new)
    return hidden, gates, cells, squashed


def _gru(x: Tensor, h: Tensor, w: Tensor, bias: Maybe) -> tuple[Tensor, ...]:
    """R, z = σ(x + a); n = tanh(x_n + r a_n); h' = n + (h - n) z.  All h', the gates r z n, and a_n."""
    gates, size = x.new_empty(x.shape), w.shape[0] // 3
    hidden, inner = (x.new_empty((*x.shape[:2], size)) for _ in range(2))
    first, last = x[..., : 2 * size], x[..., 2 * size :]
    made = gates[..., : 2 * size], *gates.split(size, -1)
    for x_rz, x_n, rz, r, z, n, a_n, h_new in zip(first, last, *made, inner, hidden, strict=True):
        a = torch.mm(h, w.t()) if bias is None else torch.addmm(bias, h, w.t())
        torch.add(x_rz, a[:, : 2 * size], out=rz).sigmoid_()
        a_n.copy_(a[:, 2 * size :])
        torch.addcmul(x_n, r, a_n, out=n).tanh_()
        h = torch.lerp(n, h, z, out=h_new)
    return hidden, gates, inner


def _rnn(x: Tensor, h: Tensor, w: Tensor, bias: Maybe, nonlinearity: str) -> Tensor:
    """H' = f(x + a)."""
    hidden = sum_of(x, bias)
    for now in hidden:
        h = _NONLINEAR[nonlinearity](now.addmm_(h, w.t()))
    return hidden


lstm = _define(
    "lstm(Tensor x, Tensor h, Tensor c, Tensor w, Tensor? bias, Tensor? projection)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _lstm,
    lambda x, h, c, *_: tuple(x.new_empty((*x.shape[:2], n)) for n in (h.shape[1], x.shape[2], *[c.shape[1]] * 2)),
    of_torch.lstm,
)
gru = _define(
    "gru(Tensor x, Tensor h, Tensor w, Tensor? bias) -> (Tensor, Tensor, Tensor)", _gru,
    lambda x, h, *_: tuple(x.new_empty((*x.shape[:2], n)) for n in (h.shape[1], x.shape[2], h.shape[1])), of_torch.gru,
)  # fmt: skip
rnn = _define(
    "rnn(Tensor x, Tensor h, Tensor w, Tensor? bias, str nonlinearity) -> Tensor", _rnn,
    lambda x, *_: x.new_empty(x.shape), of_torch.rnn,
)  # fmt: skip


# --- backward ---------------------------------------------------------------------------------------------------------


def _lstm_backward(
    dh: Tensor, dc: Tensor, gates: Tensor, c: Tensor, cells: Tensor, squashed: Tensor, w: Tensor, projection: Maybe
) -> tuple[Tensor, ...]:
    """Dh_t += W^T da_{t+1};  dc_t = dc_{t+1} f_{t+1} + dh_t o (1 - s²) with s = tanh c_t;

    da = (dc g i (1 - i), dc c_{t-1} f (1 - f), dc i (1 - g²), dh s o (1 - o)).

    All da, all dh, and those of the initial states.  c, cells, squashed: c_0, all c and all s.
    """
    i, f, g, o = gates.chunk(4, -1)
    of_c = torch.stack([g * i * (1 - i), _shifted(c, cells) * f * (1 - f), i * (1 - g * g)], 2)
    of_o, slopes = squashed * o * (1 - o), o * (1 - squashed * squashed)
    da, every = gates.new_empty(gates.shape), sum_of(dh, None)
    parts, first = da.unflatten(-1, (4, -1)), torch.zeros_like(every[0])
    rows = parts[:, :, :3], of_c, parts[:, :, 3], of_o, slopes, f, da
    steps = list(zip([first, *every[:-1]], every, *rows, strict=True))
    for before, now, da_c, scale_c, da_o, scale_o, slope, f, da_t in reversed(steps):
        raw = now if projection is None else now @ projection
        dc = torch.addcmul(dc, raw, slope)
        torch.mul(dc.unsqueeze(1), scale_c, out=da_c)
        torch.mul(raw, scale_o, out=da_o)
        dc.mul_(f)
        before.addmm_(da_t, w)
    return da, every, first, dc


def _recurrence(dh: Tensor, kept: Maybe, scale: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Dh_t += W^T da_{t+1} + dh_{t+1} kept_{t+1};  da_t = dh_t times each part of `scale` [T, B, gates, units].

    All da, all dh, and that of the initial state.
    """
    da, every = scale.new_empty(scale.shape), sum_of(dh, None)
    first = torch.zeros_like(dh[0])
    into = [first, *every.unbind(0)[:-1]]
    rows = list(zip(into, every, da, scale, [None] * len(dh) if kept is None else kept, strict=True))
    for before, now, da_t, scale_t, z in reversed(rows):
        torch.mul(now.unsqueeze(1), scale_t, out=da_t)
        before.addmm_(da_t.flatten(1), w)
        if z is not None:
            before.addcmul_(now, z)
    return da.flatten(2), every, first


def _gru_backward(dh: Tensor, hidden: Tensor, gates: Tensor, inner: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """With dn = dh_t (1 - z) (1 - n²) and dh_t as `_recurrence` has it, kept: z,

    da = (dn a_n r (1 - r), dh_t (h_{t-1} - n) z (1 - z), dn r), and dx the same with dn in the last place.

    All dx, all da, and that of the initial state.
    """
    r, z, n = gates.chunk(3, -1)
    into_n = (1 - z) * (1 - n * n)
    scale = [into_n * inner * r * (1 - r), (_shifted(h, hidden) - n) * z * (1 - z), into_n * r]
    da, every, first = _recurrence(dh, z, torch.stack(scale, 2), w)
    return torch.cat([da[..., : 2 * z.shape[-1]], every * into_n], -1), da, first


def _rnn_backward(dh: Tensor, hidden: Tensor, w: Tensor, nonlinearity: str) -> tuple[Tensor, ...]:
    """Da = dh_t (1 - h'²), or where h' > 0.  All da, and that of the initial state."""
    slope = 1 - hidden * hidden if nonlinearity == "tanh" else (hidden > 0).to(hidden.dtype)
    da, _, first = _recurrence(dh, None, slope.unsqueeze(2), w)
    return da, first


lstm_backward = _define(
    "lstm_backward(Tensor dh, Tensor dc, Tensor gates, Tensor c, Tensor cells, Tensor squashed, Tensor w,"
    " Tensor? projection) -> (Tensor, Tensor, Tensor, Tensor)",
    _lstm_backward,
    lambda dh, dc, gates, *_: tuple(dh.new_empty(shape) for shape in (gates.shape, dh.shape, dh.shape[1:], dc.shape)),
    of_torch.lstm_backward,
)
gru_backward = _define(
    "gru_backward(Tensor dh, Tensor hidden, Tensor gates, Tensor inner, Tensor h, Tensor w)"
    " -> (Tensor, Tensor, Tensor)",
    _gru_backward,
    lambda dh, hidden, gates, *_: tuple(dh.new_empty(shape) for shape in (gates.shape, gates.shape, dh.shape[1:])),
    of_torch.gru_backward,
)
rnn_backward = _define(
    "rnn_backward(Tensor dh, Tensor hidden, Tensor w, str nonlinearity) -> (Tensor, Tensor)", _rnn_backward,
    lambda dh, *_: (dh.new_empty(dh.shape), dh.new_empty(dh.shape[1:])), of_torch.rnn_backward,
)  # fmt: skip


# --- gradients --------------------------------------------------------------------------------------------------------


def _lstm_gradients(saved: Sequence[Tensor], weights: Sequence[Maybe], cotangents: Sequence[Tensor]) -> Sequence[Maybe]:
    """Of x, a, h, c and the states before their projection, from the cotangents of all h and the last c."""
    gates, cells, squashed, c = saved
    (w, projection), (dh, dc) = weights, cotangents
    da, every, first, dc = lstm_backward(dh, dc, gates, c, cells, squashed, w, projection)
    return da, da, first, dc, None if projection is None else every


def _gru_gradients(saved: Sequence[Tensor], weights: Sequence[Maybe], cotangents: Sequence[Tensor]) -> Sequence[Maybe]:
    """Of x, a and h, from the cotangents of all h."""
    return gru_backward(cotangents[0], *saved, weights[0])  # type: ignore[no-any-return]


def _rnn_gradients(nonlinearity: str) -> Callable[..., Sequence[Maybe]]:
    def gradients(saved: Sequence[Tensor], weights: Sequence[Maybe], cotangents: Sequence[Tensor]) -> Sequence[Maybe]:
        """Of x, a and h, from the cotangents of all h."""
        da, first = rnn_backward(cotangents[0], saved[0], weights[0], nonlinearity)
        return da, da, first

    return gradients


_GRADIENTS: dict[str, Callable[..., Sequence[Maybe]]] = {
    "lstm": _lstm_gradients,
    "gru": _gru_gradients,
    "tanh": _rnn_gradients("tanh"),
    "relu": _rnn_gradients("relu"),
}


class _Attached(Function):
    """The states, with their gradient with respect to `inputs`."""

    @staticmethod
    def forward(ctx: Any, cell: str, counts: tuple[int, ...], *tensors: Maybe) -> tuple[Tensor, ...]:
        states, inputs = tensors[: counts[0]], tensors[counts[0] : counts[0] + counts[1]]
        ctx.cell, ctx.counts, ctx.given = cell, counts, [t is not None for t in inputs]
        ctx.save_for_backward(*tensors[counts[0] + counts[1] :])
        return tuple(t.view_as(t) for t in states if t is not None)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Maybe, ...]:
        states, _, saved = ctx.counts[:3]
        kept = ctx.saved_tensors
        found = _GRADIENTS[ctx.cell](kept[:saved], kept[saved:], cotangents)
        gradients = [g if given else None for g, given in zip(found, ctx.given, strict=True)]
        return None, None, *[None] * states, *gradients, *[None] * len(kept)


attach = define_op(
    "attach(str cell, Tensor[] states, Tensor?[] inputs, Tensor[] saved, Tensor?[] weights) -> Tensor[]",
    lambda cell, states, *_: [t.clone() for t in states],
    lambda cell, states, *_: [t.new_empty(t.shape) for t in states],
)


@under_autograd(attach)
def attached(
    cell: str, states: Sequence[Tensor], inputs: Sequence[Maybe], saved: Sequence[Tensor], weights: Sequence[Maybe]
) -> list[Tensor]:
    """`attach`, as autograd runs it."""
    counts = len(states), len(inputs), len(saved)
    return list(_Attached.apply(cell, counts, *states, *inputs, *saved, *weights))  # type: ignore[no-untyped-call]
