"""Branches on whether a mask picks anything: `if m.any(): out[m] = f(x[m])`, `if idx.numel() == 0: continue`.

While the program is captured, every mask picks something.  Whether the program computes the same where some pick
nothing, and their arms are left out, is found by captures in which these do (`passes/capture/nothing_picked.py`).  An
arm of which that is not seen (`if h.isnan().any(): h = h.nan_to_num()`) is left out, and the step looks at its mask.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg_fx.graph.facts import ARM
from psg_fx.program.code import users_frame, users_line
from psg_fx.program.decisions.arms import question_of_a_number
from psg_fx.program.decisions.assumptions import Assumption, asking
from psg_fx.program.decisions.told import COMPARED, Known, Told
from psg_fx.source import is_library
from psg_fx.torch_private.fakes import has_known_value
from psg_fx.torch_private.symbols import answering_symbols, size_of_values


@dataclass(frozen=True)
class Branch:
    """masks: what picks, a copy of its own, and others that pick nothing if that does not.
    place: the code that asks, and where in it.  line: `model.py:17: if ..`.
    """

    masks: tuple[Tensor, ...]
    place: Place
    line: str


Place = tuple[CodeType, int]

_ENDLESS = 100
"""Branches after which it is a loop that runs while a mask picks something, which it would for ever."""


class Branches:
    """Those of a program, in the order in which it asks.

    found: of the last run.  before, empty: of a run in which all masks pick something, and the numbers of those that
    pick nothing from now on.  numbers: which of those of that run were met.  left_out: where masks pick nothing in any
    run.
    """

    def __init__(
        self, before: Sequence[Branch] = (), empty: frozenset[int] = frozenset(), left_out: Container[Place] = ()
    ) -> None:
        self.before, self.empty, self.left_out = before, empty, left_out
        self.found: list[Branch] = []
        self.numbers: list[int] = []
        self._assumed: list[Assumption] = []

    @contextlib.contextmanager
    def answered(self, assumed: list[Assumption]) -> Iterator[None]:
        """Answer them while the program runs.  assumed: that masks pick nothing is added to it."""
        self.found, self.numbers, self._assumed = [], [], assumed
        mode = _Answering(self)
        with mode, answering_symbols(mode.of_symbols):
            yield

    def picks(self, known: Known, frame: FrameType) -> bool | None:
        """Whether the mask picks something in this run; None for what the run before has not met."""
        place = (frame.f_code, frame.f_lasti)
        if place in self.left_out:
            self._assumed.append(Assumption(known.says()[0].any(), users_line(frame), ARM))
            return False
        number = len(self.found)
        if self.before:
            first = self.numbers[-1] + 1 if self.numbers else 0
            there = (k for k in range(first, len(self.before)) if self.before[k].place == place)
            if (number := next(there, -1)) < 0:
                return None
        elif number >= _ENDLESS:
            return None
        self.found.append(Branch(known.says(), place, users_line(frame)))
        self.numbers.append(number)
        return number not in self.empty


class _Answering(TorchFunctionMode):
    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self.branches, self.told = branches, Told()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _AS_NUMBERS and (known := self.known(func, args[0])) is not None:
            return self.as_number(func, name, args[0], known, asking(sys._getframe(1)))
        if name == "unbind" and not kwargs and (rows := self.rows(args, users_frame(sys._getframe(1)))) is not None:
            return rows
        if self.told.lists and name in COMPARED and len(args) == 2 and _is_known_integer(args[1]):
            args = (args[0], int(args[1]))
        result = func(*args, **(kwargs or {}))
        self.told.note(name, args, kwargs or {}, result)
        return result

    def as_number(self, func: Any, name: str, tensor: Tensor, known: Known, frame: FrameType) -> Any:
        """What Python must have as a bool or an int of its own."""
        if name == "__bool__":
            outcome = self.outcome(known, frame)
            return func(tensor) if outcome is None else outcome
        question = question_of_a_number(frame, _AS_NUMBERS[name])
        outcome = None if question is None else self.outcome(known.after(question), frame)
        if outcome is None:
            return func(tensor)
        assert question is not None
        return next(number for number in (known.empty, *known.others) if bool(question(number)) is outcome)

    def rows(self, args: Sequence[Any], frame: FrameType) -> tuple[Tensor, ...] | None:
        """The list of all indexes that a mask may pick, which the code goes through; None for other tensors."""
        tensor = args[0]
        if not isinstance(tensor, Tensor) or args[1:] not in ((), (0,)) or (known := self.told.listed(tensor)) is None:
            return None
        assert known.dim is not None
        count: Any = known.mask.shape[known.dim]
        if not isinstance(count, int):
            return None
        picked = [self.outcome(replace(known, index=k), frame) for k in range(count)]
        if None in picked:
            return None
        kept = (k if tensor.ndim == 1 else [k] for k in range(count) if picked[k])
        return tuple(torch.tensor(k, dtype=tensor.dtype, device=tensor.device) for k in kept)

    def of_symbols(self, expression: Any, frame: FrameType) -> bool | None:
        """What a comparison of the number of picked rows, or of some for each row, is; None for other conditions."""
        symbols = self.told.symbols and expression.free_symbols
        if len(symbols) != 1 or (known := self.told.symbols.get(*symbols)) is None:
            return None
        (symbol,) = symbols
        if not expression.is_Relational or not (expression.lhs - expression.rhs).diff(symbol).is_number:
            return None
        return self.outcome(known.after(lambda number: expression.subs(symbol, number)), frame)

    def outcome(self, known: Known, frame: FrameType) -> bool | None:
        if known.of_each or known.outcome(True) is None or known.mask._version != known.version:
            return None
        if is_library(frame.f_code.co_filename):
            return None
        picks = self.branches.picks(known, frame)
        return None if picks is None else known.outcome(picks)

    def known(self, func: Any, tensor: Any) -> Known | None:
        """What is known of a tensor of one number; of one with rows if its length is asked."""
        if not isinstance(tensor, Tensor) or has_known_value(tensor):
            return None
        if func is torch.Tensor.__len__:
            return self.told.symbols.get(size_of_values(tensor.shape[0])) if tensor.ndim else None
        return self.told.known(tensor)


_AS_NUMBERS = {"__bool__": "bool", "__len__": "len", "__int__": "int"}
"""What makes a number of Python's own of a tensor, and what the code calls for that."""


def _is_known_integer(value: Any) -> bool:
    """Whether it is an integer that the code goes through, or another constant, as a tensor."""
    return isinstance(value, Tensor) and value.dtype is torch.int64 and not value.ndim and has_known_value(value)
