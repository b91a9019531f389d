"""What code reads and calls while it is captured, noted as it happens, in its own thread only.

Attributes of modules are noted one by one.  Of everything else is known which functions ran, and so which names may
have been read; `walk` follows those.  Values that are others at every call (random numbers of Python, the clock, the
environment, files) cannot be part of a graph and are refused with the line that asks for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from psg_fx.program.code import Origin, is_theirs, origin_of_code, source
from psg_fx.program.reads.asked import RANDOM, asked_of, asked_of_python, changing, hands_on
from psg_fx.program.reads.observed import Observed
from psg_fx.program.reads.torch_calls import TorchCalls
from psg_fx.program.stand_ins import StandIns
from psg_fx.source import TORCH
from psg_fx.torch_private.fakes import FakeTensor
from psg_fx.torch_private.patching import patched_here, seen_here
from psg_fx.torch_private.symbols import answering_symbols
from psg_fx.torch_private.tracer import watching_numbers

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
_UNREAD = _OF_EVERY_MODULE | {"_flat_weights", "_flat_weight_refs"}
"""What no number follows: recurrent layers list their weights anew whenever these are other tensors."""
_LAYERS = os.path.join(TORCH, "nn", "")


@functools.cache
def _is_machinery(file: str) -> bool:
    """Whether a file is of torch, and not of its layers: tracers look at modules of their own, and at the user's."""
    return file.startswith(TORCH) and not file.startswith(_LAYERS)


_MODULE_FILE = sys.modules[nn.Module.__module__].__file__


def _reading(
    note: Callable[[nn.Module, str], None], counts: Callable[[FrameType], bool]
) -> contextlib.AbstractContextManager[None]:
    """While open, reads of the attributes of modules are noted.  counts: whether those of a frame are."""
    original: Callable[[Any, str], Any] = nn.Module.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        if name == "__dict__" and sys._getframe(1).f_code.co_filename != _MODULE_FILE and counts(sys._getframe(1)):
            for each in ("__dict__", *(set(original(self, "__dict__")) - _OF_EVERY_MODULE)):
                note(self, each)
        elif name not in _UNREAD and not name.startswith("__") and counts(sys._getframe(1)):
            note(self, name)
        return original(self, name)

    return patched_here(nn.Module, "__getattribute__", read)


@contextlib.contextmanager
def observing(found: Observed, stand_ins: StandIns) -> Iterator[None]:
    """Note what the code that runs in the meantime reads and calls; torch's functions run on what stands in for the
    model's own tensors.
    """

    def write(self: nn.Module, name: str, value: Any) -> None:
        found.sets(self, name)
        setting(self, name, value)

    def make(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        found.born[id(self)] = self
        making(self, *args, **kwargs)

    profile, setting = _Profile(found), seen_here(nn.Module, "__setattr__")
    calls = TorchCalls(profile, found, stand_ins)
    making: Callable[..., None] = seen_here(nn.Module, "__init__")
    found.made.clear()
    found.assigned.clear()
    try:
        with (
            _reading(found.read, lambda frame: not _is_machinery(frame.f_code.co_filename)),
            patched_here(nn.Module, "__setattr__", write), patched_here(nn.Module, "__init__", make),
            patched_here(FakeTensor, "tolist", lambda tensor: calls.as_list(tensor)),
            patched_here(torch.SymFloat, "__format__", _as_text), patched_here(torch.SymInt, "__format__", _as_text),
            answering_symbols(calls.decides), watching_numbers(calls.read_number), calls, profile,
        ):  # fmt: skip
            yield
    finally:
        found.born.clear()
    if found.refusal is not None:
        raise found.refusal


def _as_text(number: Any, how: str) -> str:
    """A number that is not known yet as `print` shows it: in a line of a log, how it is to be written says nothing."""
    return str(number)


@contextlib.contextmanager
def observed_later(found: Observed) -> Iterator[None]:
    """While open, `observing_backward` notes for this what passes after a capture run of the user's code."""
    before, _LATER.found = getattr(_LATER, "found", None), found
    try:
        yield
    finally:
        _LATER.found = before


@contextlib.contextmanager
def observing_backward() -> Iterator[None]:
    """Note what runs meanwhile: backward passes of the user's own functions and operators, which no capture runs."""
    found: Observed | None = getattr(_LATER, "found", None)
    if found is None:
        yield
        return
    try:
        with (
            _reading(found.read_behind, _is_code_that_counts),
            watching_numbers(found.looks_at_number),
            _Profile(found),
        ):
            yield
    except Exception as error:
        if found.refusal is not None:
            raise found.refusal from error
        raise
    if found.refusal is not None:
        raise found.refusal


def _is_code_that_counts(frame: FrameType) -> bool:
    return is_theirs(origin_of_code(frame.f_code, frame.f_globals))


_LATER = threading.local()
_TYPE_CHECKS = "<@beartype("
"""What beartype calls the code that it writes around a function: it draws which item of a list it looks at."""
_ANSWERING = (Origin.STANDARD, Origin.COMPILER)
"""Whose functions in Python say something of the world."""


class _Profile:
    """Sees every call of a function while it is on; a profiler or coverage tool of the user's is put back after."""

    def __init__(self, found: Observed) -> None:
        self.found = found
        self.known: dict[CodeType, Origin] = {}

    def __enter__(self) -> None:
        self.before = sys.getprofile()
        sys.setprofile(self)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        before: Any = self.before
        if callable(before):
            sys.setprofile(before)
        elif hasattr(before, "enable"):  # that of cProfile, which is an object with a switch; torch's has none
            before.enable()

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            code = frame.f_code
            owner = self.known.get(code)
            if owner is None:
                owner = self.known[code] = origin_of_code(code, frame.f_globals)
                if is_theirs(owner):
                    self.found.code.setdefault(code, frame.f_globals)
            if owner in _ANSWERING and (asked := asked_of_python(frame)):
                caller = frame.f_back
                while caller is not None and hands_on(caller):
                    caller = caller.f_back
                if caller is not None:
                    self._judge(asked, caller)
        elif event == "c_call":
            self._judge(asked_of(what), frame)

    def _judge(self, asked: str, frame: FrameType) -> None:
        if not asked or self.found.refusal is not None or frame.f_code.co_filename.startswith(_TYPE_CHECKS):
            return
        owner = self.known.get(frame.f_code) or origin_of_code(frame.f_code, frame.f_globals)
        if owner is Origin.USER or (owner is Origin.PACKAGE and asked == RANDOM):
            self.found.refusal = changing(asked, source(frame.f_code.co_filename, frame.f_lineno))
