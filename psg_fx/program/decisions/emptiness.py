"""Branches on whether a mask picks anything: `if m.any(): out[m] = f(x[m])`, `if idx.numel() == 0: continue`.

While the program is captured, every mask picks something.  Whether the program computes the same where some pick
nothing, and their arms are left out, is found by captures in which these do (`passes/capture/nothing_picked.py`).
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg_fx.program.code import users_line
from psg_fx.program.decisions.arms import question_of_a_number
from psg_fx.program.decisions.assumptions import asking
from psg_fx.source import is_library
from psg_fx.torch_private.fakes import has_known_value
from psg_fx.torch_private.symbols import answering_symbols, size_of_values

_MANY = 1 << 20
"""A number of rows that nothing is likely to be compared with."""


@dataclass(frozen=True)
class Branch:
    """mask: what picks, a copy of its own.  place: the code that asks, and where in it.  line: `model.py:17: if ..`."""

    mask: Tensor
    place: tuple[CodeType, int]
    line: str


@dataclass(frozen=True)
class _Known:
    """A number, or a tensor of one, that says whether a mask picks anything.

    mask: the tensor.  version: how often it had been written to.  rest: the mask is all the others.  empty: the number
    if it picks nothing.  others: numbers that it may be if it picks something.
    """

    mask: Tensor
    version: int
    rest: bool
    empty: Any
    others: tuple[Any, ...]

    def after(self, function: Callable[[Any], Any]) -> _Known:
        return replace(self, empty=function(self.empty), others=tuple(map(function, self.others)))

    def outcome(self, picks: bool) -> bool | None:
        """What it is as a condition, where the mask picks something or nothing; None where it does not say which."""
        empty, others = bool(self.empty), set(map(bool, self.others))
        return (not empty if picks else empty) if others == {not empty} else None


class Branches:
    """Those of a program, in the order in which it asks.

    found: of the last run.  before, empty: of a run in which all masks pick something, and the numbers of those that
    pick nothing from now on.  numbers: which of those of that run were met.
    """

    def __init__(self, before: Sequence[Branch] = (), empty: frozenset[int] = frozenset()) -> None:
        self.before, self.empty = before, empty
        self.found: list[Branch] = []
        self.numbers: list[int] = []

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Answer them while the program runs."""
        self.found, self.numbers = [], []
        mode = _Answering(self)
        with mode, answering_symbols(mode.of_symbols):
            yield

    def picks(self, known: _Known, frame: FrameType) -> bool | None:
        """Whether the mask picks something in this run; None for what the run before has not met."""
        place = (frame.f_code, frame.f_lasti)
        number = len(self.found)
        if self.before:
            first = self.numbers[-1] + 1 if self.numbers else 0
            there = (k for k in range(first, len(self.before)) if self.before[k].place == place)
            if (number := next(there, -1)) < 0:
                return None
        mask = (known.mask == 0 if known.rest else known.mask != 0).detach()
        self.found.append(Branch(mask, place, users_line(frame)))
        self.numbers.append(number)
        return number not in self.empty


class _Answering(TorchFunctionMode):
    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self.branches = branches
        self.tensors: dict[int, tuple[Tensor, int, _Known]] = {}
        self.masks: dict[int, tuple[Tensor, int, Tensor]] = {}
        """Numbers that a mask is cast to."""
        self.symbols: dict[Any, _Known] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _AS_NUMBERS and (known := self.known(func, args[0])) is not None:
            return self.as_number(func, name, args[0], known, asking(sys._getframe(1)))
        result = func(*args, **(kwargs or {}))
        if name in _TOLD_BY and args and isinstance(args[0], Tensor):
            self.note(name, args, kwargs or {}, result)
        return result

    def as_number(self, func: Any, name: str, tensor: Tensor, known: _Known, frame: FrameType) -> Any:
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

    def of_symbols(self, expression: Any, frame: FrameType) -> bool | None:
        """What a comparison of the number of picked rows, or of some for each row, is; None for other conditions."""
        if not self.symbols:
            return None
        if len(symbols := expression.free_symbols) != 1 or (known := self.symbols.get(*symbols)) is None:
            return None
        (symbol,) = symbols
        if not expression.is_Relational or not (expression.lhs - expression.rhs).diff(symbol).is_number:
            return None
        return self.outcome(known.after(lambda number: expression.subs(symbol, number)), frame)

    def outcome(self, known: _Known, frame: FrameType) -> bool | None:
        if known.outcome(True) is None or known.mask._version != known.version or is_library(frame.f_code.co_filename):
            return None
        picks = self.branches.picks(known, frame)
        return None if picks is None else known.outcome(picks)

    def known(self, func: Any, tensor: Any) -> _Known | None:
        """What is known of a tensor of one number; of one with rows if its length is asked."""
        if not isinstance(tensor, Tensor) or has_known_value(tensor):
            return None
        if func is torch.Tensor.__len__:
            return self.symbols.get(size_of_values(tensor.shape[0])) if tensor.ndim else None
        found: _Known | None = self.found(self.tensors, tensor)
        return found

    def found(self, kept: Mapping[int, tuple[Tensor, int, Any]], tensor: Tensor) -> Any:
        """What is noted of a tensor that has not been written to since."""
        _, version, found = kept.get(id(tensor), (None, -1, None))
        return found if version == tensor._version else None

    def note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What a result tells of a mask."""
        tensor, rest = args[0], [*args[1:], *kwargs.values()]
        if name in _LISTING:
            self.note_rows(name, tensor, rest, result)
            return
        known = self.told(name, tensor, rest)
        if isinstance(result, Tensor) and name in _SAME and tensor.dtype is torch.bool and tensor.ndim:
            self.masks[id(result)] = result, result._version, tensor
        if known is None:
            return
        if isinstance(result, Tensor):
            self.tensors[id(result)] = result, result._version, known
        elif (node := getattr(result, "node", None)) is not None and node.expr.is_Symbol:
            self.symbols[node.expr] = known.after(int)

    def told(self, name: str, tensor: Tensor, rest: Sequence[Any]) -> _Known | None:
        """What is known of what a function gives for a tensor."""
        known: _Known | None = self.found(self.tensors, tensor)
        if known is None:
            cast = self.found(self.masks, tensor)
            mask = tensor if cast is None else cast
            if rest or name not in _ASKED_OF_MASKS or (mask.dtype is not torch.bool and name in _OF_BOOLS):
                return None
            return _Known(mask, mask._version, name == "all", *_ASKED_OF_MASKS[name])
        if name in _COMPARED and len(rest) == 1 and isinstance(rest[0], (int, float)):
            return known.after(lambda number: _COMPARED[name](number, rest[0]))
        if name == "logical_not" or (name in _INVERTED and tensor.dtype is torch.bool):
            return known.after(operator.not_)
        return known if name in _SAME else None

    def note_rows(self, name: str, tensor: Tensor, rest: Sequence[Any], result: Any) -> None:
        """The number of rows that a mask picks has a symbol."""
        if (name == "where" and rest) or (name in _PICKS and not rest):
            return
        mask = rest[0] if name in _PICKS else tensor
        masks = [m for m in (mask if isinstance(mask, tuple) else (mask,)) if isinstance(m, Tensor)]
        first = result[0] if isinstance(result, (tuple, list)) else result
        if len(masks) != 1 or not isinstance(first, Tensor) or (name in _PICKS and masks[0].dtype is not torch.bool):
            return
        before = {size_of_values(size) for given in (tensor, *masks) for size in given.shape}
        for symbol in {*map(size_of_values, first.shape)} - before - {None}:
            self.symbols.setdefault(symbol, _Known(masks[0], masks[0]._version, False, 0, (1, _MANY)))


_ASKED_OF_MASKS = {
    "any": (False, (True,)), "all": (True, (False,)), "sum": (0, (1, _MANY)), "count_nonzero": (0, (1, _MANY)),
}  # fmt: skip
_OF_BOOLS = {"all", "sum"}
_PICKS = {"masked_select", "__getitem__"}
_LISTING = {*_PICKS, "nonzero", "argwhere", "where"}
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "__gt__": operator.gt, "__ge__": operator.ge, "__lt__": operator.lt, "__le__": operator.le,
    "__eq__": operator.eq, "__ne__": operator.ne, "greater": operator.gt, "less": operator.lt,
}  # fmt: skip
_INVERTED = {"bitwise_not", "__invert__"}
_SAME = {"detach", "to", "item", "float", "double", "long", "int", "bool", "cpu", "clone", "squeeze", "view", "reshape"}
_TOLD_BY = {*_ASKED_OF_MASKS, "logical_not", *_LISTING, *_COMPARED, *_INVERTED, *_SAME}
_AS_NUMBERS = {"__bool__": "bool", "__len__": "len", "__int__": "int"}
"""What makes a number of Python's own of a tensor, and what the code calls for that."""
