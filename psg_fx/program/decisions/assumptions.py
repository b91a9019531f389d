"""Branches on values of tensors of which one arm only raises: `if labels.max() >= n: raise ...`, `assert x.min() > 0`.

While the program is captured the other arm is taken, and what was asked becomes an output of the graph, so that a step
looks at it at every call.  Which arm that is, the bytecode of the frame that asks says.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg_fx.graph.facts import DRAWN
from psg_fx.program.code import users_line
from psg_fx.program.decisions.arms import (
    asks_which_one,
    comparison_that_stays,
    is_caught,
    outcome_that_stays,
    users_frames,
)
from psg_fx.program.decisions.draws import Draws
from psg_fx.torch_private.fakes import has_known_value
from psg_fx.torch_private.modes import ASSERT_LATER, CHECK_ALL, FILE_OF_TENSORS, IS_ALL_TRUE
from psg_fx.torch_private.symbols import answering_symbols, computed_of


@dataclass(frozen=True)
class Assumption:
    """violated: a bool tensor of shape (), true where the code would raise.  line: `model.py:17: if y.max() > 4:`.
    of: another thing that is assumed, the field of its check.
    """

    violated: Tensor
    line: str
    of: str = ""


@contextlib.contextmanager
def assuming(found: list[Assumption], caller: CodeType) -> Iterator[None]:
    """Take the arms that do not raise, and note what was assumed.  caller: the code that calls the user's."""
    mode = _Assuming(found, caller)
    with mode, answering_symbols(mode.answer):
        yield


_ASSERTS = (torch._assert, IS_ALL_TRUE, ASSERT_LATER)


class _AllTrue:
    """What `torch._check_tensor_all` asks for its value."""

    def item(self) -> bool:
        """It is assumed."""
        return True


class _Assuming(TorchFunctionMode):
    def __init__(self, found: list[Assumption], caller: CodeType) -> None:
        super().__init__()
        self.found, self.caller = found, caller
        self.draws = Draws()
        self.read: dict[Any, Tensor] = {}
        """The tensors out of which numbers were read, by the symbols of these."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__bool__ and not has_known_value(args[0]):
            frame = asking(sys._getframe(1))
            outcome = outcome_that_stays(frame, self.caller)
            if outcome is not None:
                return self.assume(args[0], outcome, frame)
        if func in _ASSERTS and isinstance(args[0], Tensor) and not has_known_value(args[0]):
            frame = asking(sys._getframe(1))
            asserted = func is not IS_ALL_TRUE or frame.f_code is CHECK_ALL
            if asserted and not any(is_caught(f) for f in users_frames(frame, self.caller)):
                self.assume(args[0].all() if func is IS_ALL_TRUE else args[0], True, frame)
                return _AllTrue() if func is IS_ALL_TRUE else None
            if func is ASSERT_LATER:  # what the code does then is another branch
                func, kwargs = torch._assert, {"message": ""}
        if func in _NUMBERS and _is_unknown_number(args[0]):
            frame = asking(sys._getframe(1))
            return self.number(func, args[0], frame)
        if func in _ASKED:
            frame = asking(sys._getframe(1))
            outcome = outcome_that_stays(frame, self.caller, func.__name__)
            if outcome is not None:
                return self.assume(_ASKED[func](*args, **(kwargs or {})), outcome, frame)
        if self.draws.may_be_zero(func, args):
            self.found.append(Assumption((args[0].detach() == 0).all(), users_line(asking(sys._getframe(1))), DRAWN))
        result = func(*args, **(kwargs or {}))
        self.draws.drawn(func, result)
        return result

    def number(self, func: Callable[[Tensor], Any], tensor: Tensor, frame: FrameType) -> Any:
        """The number in a tensor, which the code may decide by: a symbol, or where Python must have one, any of those
        for which the code does not raise.
        """
        wide, kind = tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64), _NUMBERS[func]
        if kind is not None:
            found = comparison_that_stays(frame, self.caller, kind.__name__)
            if found is None or (number := found.number(kind)) is None:
                return func(tensor)
            self.assume(found.compare(wide.trunc() if kind is int else wide, found.other), found.outcome, frame)
            return number
        is_switch = tensor.dtype is torch.bool
        if is_switch and asks_which_one(frame.f_code):
            return bool(tensor)  # torch says that this is a branch; of a symbol the code would be told the wrong arm
        symbol = func(wide if is_switch else tensor)
        if (node := getattr(symbol, "node", None)) is not None and node.expr.is_Symbol:
            self.read[node.expr] = wide
        return symbol == 1 if is_switch else symbol

    def answer(self, condition: Any, frame: FrameType) -> bool | None:
        """What a condition on such numbers is; None for other conditions, and where both arms do something."""
        if not self.read:
            return None
        with torch.no_grad():
            value = computed_of(condition, self.read)
        if value is None or (outcome := outcome_that_stays(frame, self.caller)) is None:
            return None
        return self.assume(value, outcome, frame)

    def assume(self, condition: Tensor, outcome: bool, frame: FrameType) -> bool:
        """Note that the condition has this outcome."""
        value = condition.detach().reshape(())
        violated = value.eq(0) if outcome else value.ne(0)
        self.found.append(Assumption(violated, users_line(frame)))
        return outcome


_NUMBERS: dict[Any, type | None] = {torch.Tensor.item: None, torch.Tensor.__int__: int, torch.Tensor.__float__: float}
"""What reads a number out of a tensor, and which type of Python's it must have."""


def _is_unknown_number(tensor: Tensor) -> bool:
    return all(type(n) is int and n == 1 for n in tensor.shape) and not (tensor.is_complex() or has_known_value(tensor))


def _are_close(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    return torch.isclose(a, b, rtol, atol, equal_nan).all()


def _are_equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).all() if a.shape == b.shape else torch.full((), False, device=a.device)


_ASKED: dict[Any, Callable[..., Tensor]] = {
    torch.allclose: _are_close, torch.Tensor.allclose: _are_close, torch.equal: _are_equal,
    torch.Tensor.equal: _are_equal,
}  # fmt: skip
"""What is asked by functions whose answer is a bool of Python's."""

_BETWEEN = (torch.overrides.__file__, FILE_OF_TENSORS, __file__)


def asking(frame: FrameType) -> FrameType:
    """The frame that asked, under those of the function modes."""
    code = frame.f_code
    while frame.f_back is not None and (code.co_name == "__torch_function__" or code.co_filename in _BETWEEN):
        frame = frame.f_back
        code = frame.f_code
    return frame
