"""The user's code, run on single samples of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from psg_fx.program.arguments.call import Call
from psg_fx.program.program import Program
from psg_fx.reference.state import called_with
from psg_fx.torch_private.modes import autocast_now, no_modes

from .runs import NOISE, one_of

Packed = Callable[[bool], contextlib.AbstractContextManager[Any]]

_LOOKED_AT = 64
"""Samples of a batch among which some are looked for."""


class Code:
    """A program and a call of it, under the autocast of the capture."""

    def __init__(self, program: Program, call: Call, packed: Packed) -> None:
        """packed: opens what packed sequences are in a capture, with paddings as they were or trimmed (True)."""
        self.program, self.call, self.packed = program, call, packed
        self.casts = autocast_now()
        self.noise = NOISE

    def sample(self, index: int) -> list[Tensor]:
        """A sample alone."""
        pairs = zip(self.call.tensors, self.call.dims, strict=True)
        return [one_of(t, d, index, self.noise) for t, d in pairs]

    def samples(self) -> Iterator[list[Tensor]]:
        """Some samples of the batch, each alone."""
        size = self.call.batch_size()
        for index in range(0, size, max(-(-size // _LOOKED_AT), 1)):
            yield self.sample(index)

    def run(self, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the program returns; what is known of it stays what its capture has found, and the state what it is."""
        program, given = self.program.like(), ([t.clone() for t in inputs],)
        with no_modes():  # of those who ask what the code makes itself
            fresh = {id(state[name]): state[name].clone() for name, _ in program.named_buffers()}
        state = {name: fresh.get(id(t), t) for name, t in state.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(program.stand_ins.expected(program))
            for kind, dtype in self.casts.items():
                stack.enter_context(torch.autocast(kind, dtype))
            found = called_with(program, state, given, tie_weights=False)
        return [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]


__all__ = ["Code", "Packed"]
