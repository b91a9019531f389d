"""Branches on values of tensors of which one arm only raises: `if labels.max() >= n: raise ...`, `assert x.min() > 0`.

While the program is captured the other arm is taken, and what was asked becomes an output of the graph, so that a step
looks at it at every call.  Which arm that is, the bytecode of the frame that asks says.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg_fx.program.code import users_line
from psg_fx.source import is_library
from psg_fx.torch_private.fakes import has_known_value
from psg_fx.torch_private.modes import ASSERT_LATER, CHECK_ALL, FILE_OF_TENSORS, IS_ALL_TRUE

_LONGEST = 400
"""Instructions of an arm that are looked at."""


@dataclass(frozen=True)
class Assumption:
    """violated: a bool tensor of shape (), true where the code would raise.  line: `model.py:17: if y.max() > 4:`."""

    violated: Tensor
    line: str


@contextlib.contextmanager
def assuming(found: list[Assumption], caller: CodeType) -> Iterator[None]:
    """Take the arms that do not raise, and note what was assumed.  caller: the code that calls the user's."""
    with _Assuming(found, caller):
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

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__bool__ and not has_known_value(args[0]):
            frame = _asking(sys._getframe(1))
            outcome = _outcome_that_stays(frame, self.caller)
            if outcome is not None:
                return self.assume(args[0], outcome, frame)
        if func in _ASSERTS and isinstance(args[0], Tensor) and not has_known_value(args[0]):
            frame = _asking(sys._getframe(1))
            asserted = func is not IS_ALL_TRUE or frame.f_code is CHECK_ALL
            if asserted and not any(_is_caught(f) for f in _frames(frame, self.caller)):
                self.assume(args[0].all() if func is IS_ALL_TRUE else args[0], True, frame)
                return _AllTrue() if func is IS_ALL_TRUE else None
            if func is ASSERT_LATER:  # what the code does then is another branch
                func, kwargs = torch._assert, {"message": ""}
        return func(*args, **(kwargs or {}))

    def assume(self, condition: Tensor, outcome: bool, frame: FrameType) -> bool:
        """Note that the condition has this outcome."""
        value = condition.detach().reshape(())
        violated = value.eq(0) if outcome else value.ne(0)
        self.found.append(Assumption(violated, users_line(frame)))
        return outcome


_BETWEEN = (torch.overrides.__file__, FILE_OF_TENSORS)


def _asking(frame: FrameType) -> FrameType:
    """The frame that asked, under those of the function modes."""
    code = frame.f_code
    while frame.f_back is not None and (code.co_name == "__torch_function__" or code.co_filename in _BETWEEN):
        frame = frame.f_back
        code = frame.f_code
    return frame


def _outcome_that_stays(frame: FrameType, caller: CodeType) -> bool | None:
    """The outcome whose opposite only raises; None where both arms or none of them do, or where somebody catches it."""
    plain = _plain_locals(frame)
    raises = [outcome for outcome in (True, False) if _only_raises(frame.f_code, frame.f_lasti, outcome, plain)]
    if len(raises) != 1 or any(_is_caught(f) for f in _frames(frame, caller)):
        return None
    return not raises[0]


def _frames(frame: FrameType, caller: CodeType) -> Iterator[FrameType]:
    """The user's frames down to the code that called it."""
    current: FrameType | None = frame
    while current is not None and current.f_code is not caller:
        if not is_library(current.f_code.co_filename):
            yield current
        current = current.f_back


def _is_caught(frame: FrameType) -> bool:
    return any(start <= frame.f_lasti < end and not harmless for start, end, harmless in _handlers(frame.f_code))


@functools.lru_cache(maxsize=64)
def _instructions(code: CodeType) -> tuple[dict[int, dis.Instruction], dict[int, int]]:
    """The instructions by their place, and the place of the next one."""
    listed = list(dis.get_instructions(code))
    following = {a.offset: b.offset for a, b in itertools.pairwise(listed)}
    return {i.offset: i for i in listed}, following


@functools.lru_cache(maxsize=64)
def _handlers(code: CodeType) -> list[tuple[int, int, bool]]:
    """From where to where exceptions are handled, and whether they are raised again (`with`, `finally`)."""
    at, following = _instructions(code)
    ends = ("RERAISE", "WITH_EXCEPT_START", "CHECK_EXC_MATCH", "POP_EXCEPT", "CHECK_EG_MATCH")
    found = []
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        place: int | None = entry.target
        while place is not None and at[place].opname not in ends:
            place = following.get(place)
        harmless = place is not None and at[place].opname in ends[:2]
        found.append((entry.start, entry.end, harmless and not _suppresses(at, entry.start)))
    return found


def _suppresses(at: dict[int, dis.Instruction], inside: int) -> bool:
    """Whether the block that begins there is one of `with contextlib.suppress(..)`: others do not end exceptions."""
    entered = max((i for i in at.values() if i.offset < inside), key=lambda i: i.offset, default=None)
    if entered is None or entered.opname != "BEFORE_WITH":
        return False
    before = (i for i in at.values() if i.offset < entered.offset and _begin(i) >= _begin(entered))
    return any(i.argval == "suppress" for i in before)


def _begin(instruction: dis.Instruction) -> tuple[int, int]:
    """Line and column of its code; (-1, -1) where nothing is known."""
    place = instruction.positions
    return (-1, -1) if place is None else (place.lineno or -1, place.col_offset or 0)


def _plain_locals(frame: FrameType) -> dict[str, bool]:
    """The local variables that are true or false for good: switches (`if labels.max() >= n and strict:`)."""
    at, _ = _instructions(frame.f_code)
    written = {i.argval for i in at.values() if i.offset > frame.f_lasti and not i.opname.startswith("LOAD")}
    plain = {name: value for name, value in frame.f_locals.items() if isinstance(value, (bool, int, str, NoneType))}
    return {name: bool(value) for name, value in plain.items() if name not in written}


def _only_raises(code: CodeType, place: int, outcome: bool, plain: Mapping[str, bool]) -> bool:
    """Whether, with this outcome of the condition that the instruction at `place` asks for, every way ends in a raise.

    A stack of places yet to be looked at; each with what is known of the value that is tested next.  plain: what is
    known of local variables.
    """
    at, following = _instructions(code)
    if place not in at or not _asks(at[place]):
        return False
    waiting: list[tuple[int, bool | None]] = [(place, outcome)]
    seen: set[tuple[int, bool | None]] = set()
    while waiting:
        here, known = waiting.pop()
        if (here, known) in seen:
            continue
        seen.add((here, known))
        instruction, after = at[here], following.get(here)
        if instruction.opname == "RAISE_VARARGS" and not _caught_at(code, here):
            continue
        ways = _ways(instruction, after, known, plain)
        if ways is None or len(seen) > _LONGEST:
            return False
        waiting += ways
    return True


def _asks(instruction: dis.Instruction) -> bool:
    name = instruction.opname
    return name in ("UNARY_NOT", "TO_BOOL") or ("JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name))


def _caught_at(code: CodeType, place: int) -> bool:
    return any(start <= place < end and not harmless for start, end, harmless in _handlers(code))


def _ways(
    instruction: dis.Instruction, after: int | None, known: bool | None, plain: Mapping[str, bool]
) -> list[tuple[int, bool | None]] | None:
    """Where the code goes on, and what is known of the next tested value; None where it leaves or goes back."""
    name = instruction.opname
    if name.startswith(("RETURN", "YIELD", "RAISE", "RERAISE", "JUMP_BACKWARD", "SEND", "FOR_ITER")) or after is None:
        return None
    if name == "UNARY_NOT":
        return [(after, None if known is None else not known)]
    if name in ("TO_BOOL", "COPY", "NOP", "CACHE", "EXTENDED_ARG", "NOT_TAKEN"):
        return [(after, known)]
    if name in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"):
        return [(after, plain.get(instruction.argval))]
    if "JUMP" in name and ("IF_" in name):
        jumps = {"TRUE": True, "FALSE": False}.get(name.partition("IF_")[2].removesuffix("_OR_POP"))
        if jumps is None or known is None:  # also: whether something is None
            return [(after, None), (instruction.argval, None)]
        return (
            [(instruction.argval, known if name.endswith("_OR_POP") else None)] if known is jumps else [(after, None)]
        )
    if name.startswith("JUMP"):
        return [(instruction.argval, known)]
    return [(after, None)]
