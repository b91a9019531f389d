"""Which arm of a branch only raises: the bytecode of the frame that asks says."""

from __future__ import annotations

import dis
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, NoneType
from typing import Any

from psg_fx.program.objects import MISSING
from psg_fx.source import is_library

_LONGEST = 400
"""Instructions of an arm that are looked at."""
_LOADS_LOCAL = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")


def outcome_that_stays(frame: FrameType, caller: CodeType, called: str = "bool") -> bool | None:
    """The outcome whose opposite only raises; None where both arms or none of them do, or where somebody catches it.

    frame: asks for the truth of a condition, or calls a function of this name for it.
    """
    place = _tested_at(frame.f_code, frame.f_lasti, called)
    return None if place is None else _stays(frame, place, caller)


def _stays(frame: FrameType, place: int, caller: CodeType) -> bool | None:
    plain = _plain_locals(frame)
    raises = [outcome for outcome in (True, False) if _only_raises(frame.f_code, place, outcome, plain)]
    if len(raises) != 1 or any(is_caught(f) for f in users_frames(frame, caller)):
        return None
    return not raises[0]


def comparison_that_stays(frame: FrameType, caller: CodeType, called: str) -> Comparison | None:
    """What the number that a call gives is compared with at once (`float(x.max()) > 5`), if one outcome only raises."""
    found = _compared_at_once(frame, called)
    if found is None:
        return None
    compare, other, tested = found
    outcome = _stays(frame, tested, caller)
    return None if outcome is None else Comparison(compare, other, outcome)


def question_of_a_number(frame: FrameType, called: str) -> Callable[[Any], Any] | None:
    """What is asked at once of the number that a call gives: `len(t) == 0`, or whether it is zero; None for what is
    computed with.
    """
    tested = _after_a_call(frame.f_code, frame.f_lasti, called)
    at, _ = _instructions(frame.f_code)
    if tested is not None and _asks(at[tested]):
        return bool
    found = _compared_at_once(frame, called)
    return None if found is None else lambda number: found[0](number, found[1])


def _compared_at_once(frame: FrameType, called: str) -> tuple[Callable[[Any, Any], Any], float, int] | None:
    """How the number that a call gives is compared, with which other one, and where the outcome is tested."""
    place = _after_a_call(frame.f_code, frame.f_lasti, called)
    at, following = _instructions(frame.f_code)
    known: Any = MISSING
    while place is not None and at[place].opname != "COMPARE_OP":
        known = _plain_value(frame, at[place], known)
        place = following.get(place) if known is not MISSING else None
    if place is None or not isinstance(known, (int, float)):
        return None
    compare, tested = _COMPARED.get(at[place].argval), following.get(place)
    return None if compare is None or tested is None else (compare, known, tested)


@dataclass(frozen=True)
class Comparison:
    """`compare(number, other)` has this outcome."""

    compare: Callable[[Any, Any], Any]
    other: float
    outcome: bool

    def number(self, kind: type) -> Any:
        """One of this type that has it; None where none was found."""
        if not math.isfinite(self.other):
            return None
        near = (kind(self.other) + difference for difference in (0, 1, -1))
        return next((n for n in near if self.compare(n, self.other) is self.outcome), None)


_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def _plain_value(frame: FrameType, instruction: dis.Instruction, held: Any) -> Any:
    """What an instruction puts in the place of a value: a constant, a variable, an attribute; MISSING for others."""
    name, what = instruction.opname, instruction.argval
    if name in ("CACHE", "EXTENDED_ARG"):
        return held
    if name == "LOAD_CONST":
        return what
    if name in _LOADS_LOCAL or name == "LOAD_DEREF":
        return frame.f_locals.get(what, MISSING)
    if name == "LOAD_GLOBAL":
        return frame.f_globals.get(what, MISSING)
    return getattr(held, what, MISSING) if name == "LOAD_ATTR" and held is not MISSING else MISSING


def asks_which_one(code: CodeType) -> bool:
    """Whether code compares by `is True` or `is False`: a symbol is neither, and is not asked."""
    at, following = _instructions(code)
    loaded = (i.offset for i in at.values() if i.opname == "LOAD_CONST" and isinstance(i.argval, bool))
    return any(at[following[place]].opname == "IS_OP" for place in loaded if place in following)


def users_frames(frame: FrameType, caller: CodeType) -> Iterator[FrameType]:
    """The user's frames down to the code that called it."""
    current: FrameType | None = frame
    while current is not None and current.f_code is not caller:
        if not is_library(current.f_code.co_filename):
            yield current
        current = current.f_back


def is_caught(frame: FrameType) -> bool:
    """Whether an error that is raised where it is now is caught there, and not raised again."""
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
    """Whether, with this outcome of the condition that is tested at `place`, every way ends in a raise.

    A stack of places yet to be looked at; each with what is known of the value that is tested next.  plain: what is
    known of local variables.
    """
    at, following = _instructions(code)
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


def _tested_at(code: CodeType, place: int, called: str) -> int | None:
    """Where a condition is tested: where it is asked for, or after the call of the function that tells it."""
    at, _ = _instructions(code)
    return place if place in at and _asks(at[place]) else _after_a_call(code, place, called)


def _after_a_call(code: CodeType, place: int, called: str) -> int | None:
    """The place after a call of a function of this name, if it is one."""
    at, following = _instructions(code)
    if place not in at or not at[place].opname.startswith("CALL") or _begin(at[place]) < (1, 0):
        return None
    loads = [i for i in at.values() if i.offset < place and i.opname.startswith("LOAD")]
    names = [i.argval for i in loads if _begin(i) == _begin(at[place])]
    return following.get(place) if names[-1:] == [called] else None


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
    if name in _LOADS_LOCAL:
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
