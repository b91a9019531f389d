"""Recurrent layers between a parameter and its use: the loop in ops that `vjp` under `vmap` differentiates.

`attach` has the values of the states, and gives them a gradient.  Here the states are computed anew from the same
inputs.  In a_t = W h_{t-1} + b the states before count as constants; W (h_{t-1} - constant h_{t-1}) adds their part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx.op_table import prefix_formula
from psg_fx.ops.recurrent.layers import Maybe, attach

_Inputs = Sequence[Tensor]


def _changed(h: Tensor, w: Maybe) -> Tensor:
    """Zero, with the gradient of W h."""
    return F.linear(h - h.detach(), w)  # type: ignore[arg-type]


def _parts(gates: Tensor, count: int) -> tuple[Tensor, ...]:
    """Gates side by side, one by one."""
    found: tuple[Tensor, ...] = gates.unflatten(-1, (count, -1)).unbind(-2)
    return found


def _lstm(inputs: _Inputs, weights: Sequence[Maybe]) -> list[Tensor]:
    x, a, h, c, projected = inputs
    w, projection = weights
    states = []
    for t, gates in enumerate((x + a).unbind(0)):
        i, f, g, o = _parts(gates + _changed(h, w), 4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        if projection is not None:
            h = projected.unbind(0)[t] + _changed(h, projection)
        states.append(h)
    return [torch.stack(states), c]


def _gru(inputs: _Inputs, weights: Sequence[Maybe]) -> list[Tensor]:
    x, a, h = inputs
    states = []
    for now, before in zip(x.unbind(0), a.unbind(0), strict=True):
        (x_r, x_z, x_n), (a_r, a_z, a_n) = _parts(now, 3), _parts(before + _changed(h, weights[0]), 3)
        n = (x_n + (x_r + a_r).sigmoid() * a_n).tanh()
        h = n + (h - n) * (x_z + a_z).sigmoid()
        states.append(h)
    return [torch.stack(states)]


def _rnn(nonlinear: Callable[[Tensor], Tensor]) -> Callable[[_Inputs, Sequence[Maybe]], list[Tensor]]:
    def states_of(inputs: _Inputs, weights: Sequence[Maybe]) -> list[Tensor]:
        x, a, h = inputs
        states = []
        for now in (x + a).unbind(0):
            h = nonlinear(now + _changed(h, weights[0]))
            states.append(h)
        return [torch.stack(states)]

    return states_of


_STATES = {"lstm": _lstm, "gru": _gru, "tanh": _rnn(torch.tanh), "relu": _rnn(torch.relu)}


@prefix_formula(attach)
def attached_to_parameters(
    cell: str, states: Sequence[Tensor], inputs: _Inputs, saved: Sequence[Tensor], weights: Sequence[Maybe]
) -> list[Tensor]:
    """The states that `attach` is given, computed from its inputs."""
    return _STATES[cell](inputs, weights)
