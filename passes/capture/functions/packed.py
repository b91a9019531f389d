"""Packed sequences, as `nn.utils.rnn` makes them of padded ones, and recurrent layers over them.

Torch packs the steps of all samples into one dim, in an order that depends on their lengths.  Here they stay padded:
`pack_padded_sequence` returns a `Kept` (`program/arguments/packed.py`), as inputs are, which recurrent layers and
`pad_packed_sequence` know.  What it is computed from beyond the length of a sample is never read: not even a NaN there
has a part in a result.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from psg_fx.errors import NotYetSupported
from psg_fx.program.arguments.packed import Kept, inside
from psg_fx.program.code import users_line
from psg_fx.torch_private.patching import code_replaced_here, patched_here

from .recurrent_layers import LAYERS, Steps, recurrent


@dataclass
class Padding:
    """How packed sequences are padded again without a total_length, and what was found of it.

    trims: to the longest sample, and not as they were.  line: of the code that asks for it first.  sizes: to how many
    steps they were padded, and how many the longest sample has.
    """

    trims: bool = False
    line: str = ""
    sizes: set[tuple[int, int]] = field(default_factory=set)

    def length(self, lengths: Tensor, size: int) -> int:
        """The number of steps, of sequences that were padded to `size`; of one step, there is nothing to trim."""
        if size == 1:
            return size
        self.line = self.line or users_line(sys._getframe(2))
        if not self.trims:
            return size
        longest = int(lengths.max())
        self.sizes.add((size, longest))
        return longest


_PADDING: ContextVar[Padding] = ContextVar("_PADDING")


# --- packing ----------------------------------------------------------------------------------------------------------


def pack_padded_sequence(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """`[B, T, ..]` (batch_first) or `[T, B, ..]` with lengths `[B]`, which are looked at in every call: 1 to T."""
    padded = input.transpose(0, 1) if batch_first else input
    found = _lengths(lengths, padded).to(torch.int64)
    steps = found.to(padded.device)
    torch._assert((steps >= 1).all(), "a sample has no steps")
    torch._assert((steps <= padded.shape[0]).all(), "a sample has more steps than there are")
    if enforce_sorted:
        torch._assert((steps.cummin(0).values == steps).all(), "lengths are not in decreasing order")
    return Kept(padded, found)


def _steps(sequence: Kept) -> Steps:
    """Which steps each sample has, where the values are; in range whatever is given, since a step refuses it later."""
    size = sequence.padded.shape[0]
    return Steps(sequence.lengths.to(sequence.padded.device).clamp(1, size), size)


def _lengths(given: Any, padded: Tensor) -> Tensor:
    """Lengths `[B]`, where they are given as numbers: the same for all samples."""
    if isinstance(given, Tensor):
        return given
    numbers = all(isinstance(n, int) for n in given)  # those of `lengths.tolist()` are none yet
    if not numbers or len(set(given)) != 1 or len(given) != padded.shape[1]:
        raise NotYetSupported(
            "a packed sequence with its lengths as a list", where=users_line(sys._getframe(1)),
            why="a graph is for all lengths, and a list in the code is the same at every call",
            fix="give the tensor [B] of lengths itself, from the inputs or computed: without .tolist()",
        )  # fmt: skip
    return torch.full((padded.shape[1],), int(next(iter(given))), dtype=torch.int64)


def pad_packed_sequence(
    sequence: Kept, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """`[T, B, ..]` (or `[B, T, ..]`) with `padding_value` beyond each sample's length, and the lengths `[B]`.

    T: total_length, without which torch has the longest length of the batch, so that a sample alone would have its own.
    While a model is captured it is that of the padded input, and noted: `passes/alone/` looks whether that matters.
    """
    padded, lengths = sequence.padded, sequence.lengths
    size = padded.shape[0]
    if total_length is None:
        total_length = _PADDING.get().length(lengths, size)
    padded = padded.masked_fill(_beside(~_steps(sequence).valid, padded), padding_value)
    if total_length > size:
        more = padded.new_full((total_length - size, *padded.shape[1:]), padding_value)
        padded = torch.cat([padded, more])
    elif total_length < size:
        torch._assert((lengths <= total_length).all(), "Expected total_length to be at least the longest length")
        padded = padded[:total_length]
    return padded.transpose(0, 1) if batch_first else padded, lengths


def unpack_sequence(packed_sequences: Kept) -> list[Tensor]:
    """Refused: as many tensors as samples, each of another length."""
    raise inside("unpacked into a tensor for each sample")


def _beside(mask: Tensor, values: Tensor) -> Tensor:
    """A mask `[T, B]` for values `[T, B, ..]`."""
    return mask.reshape(*mask.shape, *[1] * (values.ndim - 2))


# --- recurrent layers -------------------------------------------------------------------------------------------------


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The layer's forward, on packed sequences as well."""

    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        return over_kept(self, input, hx) if isinstance(input, Kept) else original(self, input, hx)

    return forward


def over_kept(module: nn.RNNBase, sequence: Kept, hx: Any) -> tuple[Kept, Any]:
    """What a recurrent layer gives of each sample's own steps: all outputs, and the last states, `[layers, B, H]`."""
    module._update_flat_weights()
    steps = _steps(sequence)
    x = sequence.padded.masked_fill(~steps.valid.unsqueeze(-1), 0.0)
    two = module.mode == "LSTM"
    if hx is None:
        rows = module.num_layers * (1 + module.bidirectional)
        sizes = (module.proj_size or module.hidden_size, module.hidden_size)[: 1 + two]
        hx = tuple(x.new_zeros(rows, x.shape[1], n) for n in sizes)
    weights: Any = module._flat_weights
    outputs, *states = recurrent(
        LAYERS[module.mode], x, hx if isinstance(hx, Sequence) else (hx,), weights, module.bias,
        module.num_layers, module.dropout, module.training, module.bidirectional, False, steps,
    )  # fmt: skip
    return Kept(outputs, sequence.lengths), tuple(states) if two else states[0]


def _where_kept(written: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of torch, as written here for what is kept padded."""

    def made(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda sequence, *args, **named: (written if isinstance(sequence, Kept) else own)(
            sequence, *args, **named
        )

    return made


@contextlib.contextmanager
def packed_as_padded(trims: bool = False) -> Iterator[Padding]:
    """While open, what is packed in this thread stays padded."""
    found = Padding(trims)
    before = _PADDING.set(found)
    with contextlib.ExitStack() as stack:
        stack.enter_context(code_replaced_here(rnn.pack_padded_sequence, lambda _: pack_padded_sequence))
        stack.enter_context(code_replaced_here(rnn.pad_packed_sequence, _where_kept(pad_packed_sequence)))
        stack.enter_context(code_replaced_here(rnn.unpack_sequence, _where_kept(unpack_sequence)))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(patched_here(kind, "forward", _forward(kind.forward)))
        try:
            yield found
        finally:
            _PADDING.reset(before)
