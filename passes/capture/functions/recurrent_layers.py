"""Recurrent layers over all time steps at once: linear layers, and an op with the loop inside (`ops/recurrent/`).

x: `[T, B, I]`, h and c: `[B, H]`.  Every weight is used once, by a linear layer over all T; a single cell, as
`nn.LSTMCell`, is written out.  Torch's own table leaves out the dropout between layers (2.11 to 2.15).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx.op_table import at_capture, decomposition
from psg_fx.ops.recurrent import of_parameters as of_parameters
from psg_fx.ops.recurrent.layers import attach, gru, lstm, rnn

aten = torch.ops.aten
State = tuple[Tensor, ...]
Layer = Callable[[Tensor, State, "LayerWeights"], tuple[Tensor, State]]


@dataclass(frozen=True)
class LayerWeights:
    """One layer in one direction: W_ih `[gates·H, I]`, W_hh `[gates·H, H]`, their biases, and a projection `[P, H]`."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    hr: Tensor | None = None

    @classmethod
    def each(cls, flat: Sequence[Tensor], biases: bool, projected: bool) -> Iterator[LayerWeights]:
        """The layers of torch's flat list, the two directions of a layer one after the other."""
        size = 2 + 2 * biases + projected
        for start in range(0, len(flat), size):
            ih, hh, *rest = flat[start : start + size]
            b_ih, b_hh = rest[:2] if biases else (None, None)
            yield cls(ih, hh, b_ih, b_hh, rest[-1] if projected else None)


@dataclass(frozen=True)
class Steps:
    """Samples of `lengths[b]` steps each, int64 `[B]`, padded to `size`; a padding may hold anything that is finite."""

    lengths: Tensor
    size: int

    @cached_property
    def valid(self) -> Tensor:
        """`[T, B]`: whether step t is one of sample b."""
        return self._numbers() < self.lengths

    def turned(self, x: Tensor) -> Tensor:
        """x `[T, B, N]` with the steps of each sample in reverse order, and the padding where it was."""
        numbers = self._numbers()
        places = torch.where(self.valid, self.lengths - 1 - numbers, numbers)
        return x.gather(0, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def last(self, x: Tensor) -> Tensor:
        """x `[T, B, N]` in the last step of each sample, `[B, N]`."""
        places = (self.lengths - 1).reshape(1, -1, 1)
        return x.gather(0, places.expand(-1, -1, x.shape[-1])).squeeze(0)

    def gated(self, gates: Tensor, idle: Sequence[float]) -> Tensor:
        """The gates' part from the input `[T, B, gates·H]`, that of padding such that the state of an LSTM stays, and
        no state grows.
        """
        size = gates.shape[-1] // len(idle)
        row = torch.cat([gates.new_full((size,), value) for value in idle])
        return torch.where(self.valid.unsqueeze(-1), gates, row)

    def _numbers(self) -> Tensor:
        return torch.arange(self.size, device=self.lengths.device).unsqueeze(1)


# --- layers over all T ------------------------------------------------------------------------------------------------


def lstm_layer(x: Tensor, state: State, weights: LayerWeights) -> tuple[Tensor, State]:
    """I, f, o = σ(..), g = tanh(..); c' = f c + i g; h' = o tanh(c'), times W_hr (Hochreiter, Schmidhuber 1997)."""
    (h, c), (w, bias, projection) = state, _detached(weights.hh, weights.b_hh, weights.hr)
    first = _detached(h, c)
    hidden, gates, cells, squashed = lstm(x.detach(), *first, w, bias, projection)
    projected = None
    if weights.hr is not None:
        projected = F.linear(gates[..., 3 * cells.shape[-1] :] * squashed, weights.hr).to(x.dtype)
    inputs = [x, _from_hidden(first[0], hidden, weights), h, c, projected]
    hidden, last = attach("lstm", [hidden, cells[-1]], inputs, [gates, cells, squashed, first[1]], [w, projection])
    return hidden, (hidden[-1], last)


def gru_layer(x: Tensor, state: State, weights: LayerWeights) -> tuple[Tensor, State]:
    """R, z = σ(..); n = tanh(x_n + r h_n); h' = (h - n) z + n (Cho et al. 2014, arXiv:1406.1078)."""
    w, bias, first = _detached(weights.hh, weights.b_hh, *state)
    hidden, gates, inner = gru(x.detach(), first, w, bias)
    inputs = [x, _from_hidden(first, hidden, weights), *state]
    (hidden,) = attach("gru", [hidden], inputs, [hidden, gates, inner, first], [w])
    return hidden, (hidden[-1],)


def elman_layer(nonlinearity: str) -> Layer:
    """H' = f(W_ih x + W_hh h) (Elman 1990)."""

    def layer(x: Tensor, state: State, weights: LayerWeights) -> tuple[Tensor, State]:
        w, bias, first = _detached(weights.hh, weights.b_hh, *state)
        hidden = rnn(x.detach(), first, w, bias, nonlinearity)
        inputs = [x, _from_hidden(first, hidden, weights), *state]
        (hidden,) = attach(nonlinearity, [hidden], inputs, [hidden], [w])
        return hidden, (hidden[-1],)

    return layer


def _detached(*tensors: Tensor | None) -> list[Any]:
    """What the loop reads: its gradients are those that `attach` gives."""
    return [None if t is None else t.detach() for t in tensors]


def _from_hidden(first: Tensor, hidden: Tensor, weights: LayerWeights) -> Tensor:
    """W_hh h_{t-1} + b_hh for every t."""
    return F.linear(torch.cat([first.unsqueeze(0), hidden[:-1]]), weights.hh, weights.b_hh).to(hidden.dtype)


def recurrent(
    layer: Layer, x: Tensor, initial: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool, steps: Steps | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers: the outputs of the last one, then the last state of every layer and direction, stacked.

    steps: where each sample has a length of its own; the outputs beyond it mean nothing.  A padding has no part in what
    is before it, so forwards only the last state must be picked; backwards each sample is turned around by itself.

    Under autocast the products are of lower precision; the states keep that of the weights.
    """
    projected = len(initial) == 2 and initial[0].shape[-1] != initial[1].shape[-1]
    weights = LayerWeights.each(params, has_biases, projected)
    states = zip(*(part.to(params[1].dtype).unbind(0) for part in initial), strict=True)
    finals: list[State] = []
    turn = partial(torch.flip, dims=(0,)) if steps is None else steps.turned
    x = x.transpose(0, 1) if batch_first else x
    for index in range(num_layers):
        if index and train and dropout:
            x = torch.dropout(x, dropout, train=True)
        outputs = []
        for backwards in (False, True)[: 1 + bidirectional]:
            own = next(weights)
            gates = F.linear(x, own.ih, own.b_ih).to(own.hh.dtype)
            gates = turn(gates) if backwards else gates
            if steps is not None:
                gates = steps.gated(gates, _IDLE[layer])
            hidden, last = layer(gates, next(states), own)
            outputs.append(turn(hidden) if backwards else hidden)
            finals.append(last if steps is None else (steps.last(hidden), *last[1:]))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(part) for part in zip(*finals, strict=True)))


# --- single cells -----------------------------------------------------------------------------------------------------


@decomposition(aten.lstm_cell.default)
def lstm_cell(
    x: Tensor, state: Sequence[Tensor], ih: Tensor, hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> State:
    """One step of one layer, as `nn.LSTMCell` takes it."""
    h, c = state
    i, f, g, o = (F.linear(x, ih, b_ih) + F.linear(h, hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@decomposition(aten.gru_cell.default)
def gru_cell(
    x: Tensor, h: Tensor, ih: Tensor, hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """One step of one layer, as `nn.GRUCell` takes it."""
    x_r, x_z, x_n = F.linear(x, ih, b_ih).chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, hh, b_hh).chunk(3, -1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    n = (x_n + r * h_n).tanh()
    return (h - n) * z + n


LAYERS: dict[str, Layer] = {
    "LSTM": lstm_layer, "GRU": gru_layer, "RNN_TANH": elman_layer("tanh"), "RNN_RELU": elman_layer("relu"),
}  # fmt: skip
"""The layers, by `nn.RNNBase.mode`."""

_SHUT = -math.inf
_IDLE = dict(
    zip(LAYERS.values(), [(_SHUT, math.inf, 0.0, _SHUT), (_SHUT, math.inf, 0.0), (_SHUT,), (_SHUT,)], strict=True)
)
"""What the gates get from the input where the state is to stay (i f g o; r z n), or where a state is to be bounded."""


def _one_state(layer: Layer) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, hx, *rest: recurrent(layer, x, (hx,), *rest)


def _two_states(x: Tensor, hx: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    return recurrent(lstm_layer, x, hx, *rest)


def _unless_packed(function: Any, written: Callable[..., Any]) -> Callable[..., Any]:
    """Packed sequences come as their data and, second, the batch sizes; the weights are then no third argument."""

    def chosen(*args: Any, **named: Any) -> Any:
        padded = len(args) == 9 and isinstance(args[2], (list, tuple)) and not named
        is_lstm = function is torch.lstm
        return (written if padded and isinstance(args[1], Tensor) != is_lstm else function)(*args, **named)

    return chosen


for _function, _written in (
    (torch.lstm, _two_states),
    (torch.gru, _one_state(LAYERS["GRU"])),
    (torch.rnn_tanh, _one_state(LAYERS["RNN_TANH"])),
    (torch.rnn_relu, _one_state(LAYERS["RNN_RELU"])),
):
    decomposition(f"{_function.__name__}.input")(_written)
    at_capture(_function)(_unless_packed(_function, _written))  # torch's takes a step at a time on fake values too
