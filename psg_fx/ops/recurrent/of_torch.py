"""The loops of `layers.py` without writes into memory of their own, for graphs that leave psg_fx: a compiler that
knows no ops of psg_fx may order writes as it likes, and one that traces a loop unrolls it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Maybe = Tensor | None


def _plus(x: Tensor, bias: Maybe) -> Tensor:
    return x if bias is None else x + bias


def lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, bias: Maybe, projection: Maybe) -> tuple[Tensor, ...]:
    """All h', the gates i f g o side by side, all c' and their tanh."""
    steps = []
    for x_t in _plus(x, bias).unbind(0):
        i, f, g, o = (x_t + h @ w.t()).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        squashed = c.tanh()
        h = o * squashed if projection is None else (o * squashed) @ projection.t()
        steps.append((h, torch.cat([i, f, g, o], -1), c, squashed))
    return tuple(torch.stack(each) for each in zip(*steps, strict=True))


def gru(x: Tensor, h: Tensor, w: Tensor, bias: Maybe) -> tuple[Tensor, ...]:
    """All h', the gates r z n, and a_n."""
    steps = []
    for x_t in x.unbind(0):
        x_r, x_z, x_n = x_t.chunk(3, -1)
        a_r, a_z, a_n = _plus(h @ w.t(), bias).chunk(3, -1)
        r, z = (x_r + a_r).sigmoid(), (x_z + a_z).sigmoid()
        n = (x_n + r * a_n).tanh()
        h = n + (h - n) * z
        steps.append((h, torch.cat([r, z, n], -1), a_n))
    return tuple(torch.stack(each) for each in zip(*steps, strict=True))


def rnn(x: Tensor, h: Tensor, w: Tensor, bias: Maybe, nonlinearity: str) -> Tensor:
    """All h'."""
    function: Callable[[Tensor], Tensor] = getattr(torch, nonlinearity)
    states = []
    for x_t in _plus(x, bias).unbind(0):
        h = function(x_t + h @ w.t())
        states.append(h)
    return torch.stack(states)


def lstm_backward(
    dh: Tensor, dc: Tensor, gates: Tensor, c: Tensor, cells: Tensor, squashed: Tensor, w: Tensor, projection: Maybe
) -> tuple[Tensor, ...]:
    """All da, all dh, and those of the initial states."""
    later, steps = torch.zeros_like(dh[0]), []
    before = [c, *cells.unbind(0)[:-1]]
    each = zip(dh.unbind(0), gates.unbind(0), before, squashed.unbind(0), strict=True)
    for dh_t, gates_t, c_before, tanh in reversed(list(each)):
        i, f, g, o = gates_t.chunk(4, -1)
        every = dh_t + later
        raw = every if projection is None else every @ projection
        dc = dc + raw * o * (1 - tanh * tanh)
        of_c = [dc * g * i * (1 - i), dc * c_before * f * (1 - f), dc * i * (1 - g * g)]
        da = torch.cat([*of_c, raw * tanh * o * (1 - o)], -1)
        dc = dc * f
        later = da @ w
        steps.append((da, every))
    da_all, dh_all = (torch.stack(each[::-1]) for each in zip(*steps, strict=True))
    return da_all, dh_all, later, dc


def gru_backward(dh: Tensor, hidden: Tensor, gates: Tensor, inner: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """All dx, all da, and that of the initial state."""
    later, steps = torch.zeros_like(dh[0]), []
    before = [h, *hidden.unbind(0)[:-1]]
    each = zip(dh.unbind(0), gates.unbind(0), inner.unbind(0), before, strict=True)
    for dh_t, gates_t, a_n, h_before in reversed(list(each)):
        r, z, n = gates_t.chunk(3, -1)
        every = dh_t + later
        dn = every * (1 - z) * (1 - n * n)
        of_both = [dn * a_n * r * (1 - r), every * (h_before - n) * z * (1 - z)]
        da = torch.cat([*of_both, dn * r], -1)
        later = da @ w + every * z
        steps.append((torch.cat([*of_both, dn], -1), da))
    dx_all, da_all = (torch.stack(each[::-1]) for each in zip(*steps, strict=True))
    return dx_all, da_all, later


def rnn_backward(dh: Tensor, hidden: Tensor, w: Tensor, nonlinearity: str) -> tuple[Tensor, ...]:
    """All da, and that of the initial state."""
    later, steps = torch.zeros_like(dh[0]), []
    for dh_t, h in reversed(list(zip(dh.unbind(0), hidden.unbind(0), strict=True))):
        da = (dh_t + later) * (1 - h * h if nonlinearity == "tanh" else (h > 0).to(h.dtype))
        later = da @ w
        steps.append(da)
    return torch.stack(steps[::-1]), later
