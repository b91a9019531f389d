"""Where the user's code turns the batch size into a plain number or a decision, while it is traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import sympy
from sympy.core.relational import Relational

from psg_fx.errors import CaptureFailed, NotYetSupported
from psg_fx.program.code import is_theirs, line_of, origin_of_code
from psg_fx.source import is_library
from psg_fx.torch_private.symbols import watching_symbols


class OtherBranch(CaptureFailed):
    """A batch of one sample takes another branch than larger batches, and may compute the same all the same."""

    def as_known(self) -> NotYetSupported:
        """The refusal, where it does not."""
        return NotYetSupported(self.what, where=self.where, why=self.why, fix=self.fix)


@dataclass(frozen=True)
class Branch:
    """What is asked of the batch size, the answer, and the place: `model.py:17: if x.shape[0] > 4:`."""

    question: sympy.Basic
    answer: bool
    line: str


@dataclass
class Readings:
    """Where the code branches on the batch size, and the lines that make a number of it.

    unlike: where one sample has another number, which torch may not say, since it takes a size for two or more.
    """

    branches: list[Branch] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    unlike: list[OtherBranch] = field(default_factory=list)

    def require_one_number(self) -> None:
        """Raises OtherBranch where one sample has another number than the graph."""
        if self.unlike:
            raise self.unlike[0]

    def why(self) -> str:
        """The first of them in words, or ""."""
        if self.branches:
            return f"the code branches on the batch size ({self.branches[0].line})"
        return f"the code reads the batch size as a plain number ({self.numbers[0]})" if self.numbers else ""

    def most(self) -> int | None:
        """Up to how many samples every branch is the one that a batch of one takes; None: it is not known, or for ever.

        A batch of one takes those that were noted: others are another branch (`OtherBranch`).
        """
        if self.numbers or not self.branches:
            return None
        lasts = [_last(branch.question, branch.answer) for branch in self.branches]
        known = [last for last in lasts if last is not None]
        found = min(known, default=math.inf)
        return int(found) if len(known) == len(lasts) and found < math.inf else None


@contextlib.contextmanager
def watch_the_batch_size(found: Readings) -> Iterator[None]:
    """Note every place.

    Raises:
        OtherBranch: where a batch of one sample takes another branch than larger batches.  The loss of a sample is that
            of a batch of one: the graph of the other branch may compute something else.
    """

    def differs(frame: FrameType) -> None:
        raise _other_branch(frame)

    def branch(frame: FrameType, question: Any, answer: bool) -> None:
        found.branches.append(Branch(question, answer, line_of(frame)))

    def number(frame: FrameType) -> None:
        found.numbers.append(line_of(frame))

    def unlike(frame: FrameType) -> None:
        found.unlike.append(_other_branch(frame))

    with _watching(branch, number, differs, unlike):
        yield


@contextlib.contextmanager
def no_plain_batch_size() -> Iterator[None]:
    """Refuse code that makes a plain number of the batch size, and branches that a batch of one does not take: for
    what a capture has not run, or has as one op (backward passes, custom functions).
    """

    def refuse(frame: FrameType) -> None:
        raise NotYetSupported(
            "the code reads the batch size as a plain number", where=line_of(frame),
            why="the loss of a sample is that of a batch of one, and one graph holds one number only",
            fix="use x.shape[0] itself, without int(), float() or range(), and for shapes alone",
        )  # fmt: skip

    def differs(frame: FrameType) -> None:
        raise _other_branch(frame).as_known()

    with _watching(lambda *decision: None, refuse, differs, refuse):
        yield


@contextlib.contextmanager
def for_every_batch_size() -> Iterator[None]:
    """Refuse code that goes by the number of samples, where one graph is for all: it may compute with that number."""

    def refuse(frame: FrameType) -> None:
        raise NotYetSupported(
            "the code goes by the number of samples", where=line_of(frame),
            why="what a quantity makes of results is in one graph for every batch size, with one branch and one number",
            fix="use batch or x.shape[0] itself, without if, len(), int() or float(); let torch.where choose by "
            "torch.ones_like(x).sum(); or decide after the call, by what the step returns",
        )  # fmt: skip

    def branch(frame: FrameType, question: Any, answer: bool) -> None:
        if _last(question, answer) != math.inf:
            refuse(frame)

    with _watching(branch, refuse, refuse, refuse):
        yield


_Tell = Callable[[FrameType], None]
_Decided = Callable[[FrameType, Any, bool], None]


@contextlib.contextmanager
def _watching(branch: _Decided, number: _Tell, differs: _Tell, unlike: _Tell) -> Iterator[None]:
    """Tell of the user's frames in which a size becomes a decision, the same for one sample or another, or a number,
    and of those in which it is another number for one sample.
    """

    def seen(expression: Any, result: Any, frame: FrameType) -> None:
        if not _is_theirs(frame):
            return
        if not isinstance(result, bool):
            number(frame)
            if _is_another(expression, result):
                unlike(frame)
        elif _is_another(expression, result):
            differs(frame)
        else:
            branch(frame, expression, result)

    with watching_symbols(seen, lambda frame: unlike(frame) if _is_theirs(frame) else None):
        yield


def _is_theirs(frame: FrameType) -> bool:
    """Whether code is the user's, of a package or of the standard library: all but torch's and psg_fx's."""
    file = frame.f_code.co_filename
    without_file = file == "<string>" and is_theirs(origin_of_code(frame.f_code, frame.f_globals))
    return without_file or not is_library(file)


def _is_another(expression: Any, result: Any) -> bool:
    """Whether a decision, or a number, is another one for a batch of one."""
    alone = expression.subs(dict.fromkeys(expression.free_symbols, 1))
    if alone in (sympy.true, sympy.false) or isinstance(result, bool):
        return (alone in (sympy.true, sympy.false) or alone.is_number) and bool(alone) != bool(result)
    return bool(alone.is_number) and alone != result


def _other_branch(frame: FrameType) -> OtherBranch:
    return OtherBranch(
        "the code treats a batch of one sample differently", where=line_of(frame),
        why="the loss of a sample is that of a batch of one, and one graph holds one branch only",
        fix="write it without a branch on the batch size",
    )  # fmt: skip


def _last(question: sympy.Basic, answer: bool) -> float | None:
    """The last number of samples up to which a comparison has the answer that it has for one, `inf` for ever; None: it
    compares nothing that grows with the batch.
    """
    if not isinstance(question, Relational) or len(question.free_symbols) != 1:
        return None
    (batch,) = question.free_symbols
    difference = question.lhs - question.rhs
    slope = sympy.diff(difference, batch)
    if not slope.is_number or slope == 0:
        return None
    edge = int(sympy.floor(-difference.subs(batch, 0) / slope))
    near = (n for n in (edge, edge + 1) if n > 1)
    return next((n - 1 for n in near if bool(question.subs(batch, n)) is not answer), math.inf)
