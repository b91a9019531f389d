"""Recurrent layers written out over time, as linear layers and elementwise ops.

x: `[T, B, I]`, h and c: `[B, H]`.  The products with the inputs are one linear layer over all T; those with the hidden
state are one for each step.  `recurrent_decompositions()` is added to the table of `run_decompositions` by capture.
Torch's own table leaves out the dropout between layers (2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, "Weights"], State]


@dataclass(frozen=True)
class Weights:
    """One layer in one direction: W_ih `[gates·H, I]`, W_hh `[gates·H, H]`, their biases, and a projection `[P, H]`."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    hr: Tensor | None = None

    @classmethod
    def each(cls, flat: Sequence[Tensor], biases: bool, projected: bool) -> Iterator[Weights]:
        """The layers of torch's flat list, the two directions of a layer one after the other."""
        size = 2 + 2 * biases + projected
        for start in range(0, len(flat), size):
            ih, hh, *rest = flat[start : start + size]
            b_ih, b_hh = rest[:2] if biases else (None, None)
            yield cls(ih, hh, b_ih, b_hh, rest[-1] if projected else None)


def lstm_step(gates: Tensor, state: State, weights: Weights) -> State:
    """I, f, o = σ(..), g = tanh(..); c' = f c + i g; h' = o tanh(c'), times W_hr (Hochreiter, Schmidhuber 1997)."""
    h, c = state
    i, f, g, o = (gates + F.linear(h, weights.hh, weights.b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if weights.hr is None else F.linear(h, weights.hr)), c


def gru_step(gates: Tensor, state: State, weights: Weights) -> State:
    """R, z = σ(..); n = tanh(x_n + r h_n); h' = (h - n) z + n (Cho et al. 2014, arXiv:1406.1078)."""
    (h,) = state
    x_r, x_z, x_n = gates.chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, weights.hh, weights.b_hh).chunk(3, -1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    n = (x_n + r * h_n).tanh()
    return ((h - n) * z + n,)


def elman_step(nonlinearity: Callable[[Tensor], Tensor]) -> Step:
    """H' = f(W_ih x + W_hh h) (Elman 1990)."""

    def step(gates: Tensor, state: State, weights: Weights) -> State:
        return (nonlinearity(gates + F.linear(state[0], weights.hh, weights.b_hh)),)

    return step


def over_time(step: Step, x: Tensor, state: State, weights: Weights, backwards: bool) -> tuple[Tensor, State]:
    """One layer in one direction: all outputs `[T, B, H]`, and the last state."""
    outputs = []
    gates = F.linear(x, weights.ih, weights.b_ih).unbind(0)
    for now in reversed(gates) if backwards else gates:
        state = step(now, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def recurrent(
    step: Step, x: Tensor, initial: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers: the outputs of the last one, then the last state of every layer and direction, stacked."""
    projected = len(initial) == 2 and initial[0].shape[-1] != initial[1].shape[-1]
    weights = Weights.each(params, has_biases, projected)
    states = zip(*(part.unbind(0) for part in initial), strict=True)
    finals: list[State] = []
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        if layer and train and dropout:
            x = torch.dropout(x, dropout, train=True)
        found = [over_time(step, x, next(states), next(weights), way == 1) for way in range(1 + bidirectional)]
        finals += [state for _, state in found]
        x = torch.cat([out for out, _ in found], -1) if bidirectional else found[0][0]
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(part) for part in zip(*finals, strict=True)))


def _one_state(step: Step) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, hx, *rest: recurrent(step, x, (hx,), *rest)


def cell(
    step: Step, x: Tensor, state: State, ih: Tensor, hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> State:
    """One step of one layer, as `nn.LSTMCell` and `nn.GRUCell` take it."""
    return step(F.linear(x, ih, b_ih), state, Weights(ih, hh, b_ih, b_hh))


def recurrent_decompositions() -> dict[Any, Callable[..., Any]]:
    """Op overload -> its decomposition, for padded (not packed) sequences and single cells."""
    return {
        aten.lstm.input: lambda x, hx, *rest: recurrent(lstm_step, x, hx, *rest),
        aten.gru.input: _one_state(gru_step),
        aten.rnn_tanh.input: _one_state(elman_step(torch.tanh)),
        aten.rnn_relu.input: _one_state(elman_step(torch.relu)),
        aten.lstm_cell.default: lambda x, hx, *rest: cell(lstm_step, x, tuple(hx), *rest),
        aten.gru_cell.default: lambda x, hx, *rest: cell(gru_step, x, (hx,), *rest)[0],
    }
