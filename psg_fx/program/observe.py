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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from psg_fx.errors import NotYetSupported
from psg_fx.program.asked import RANDOM, asked_of, asked_of_python, changing, hands_on
from psg_fx.program.code import Origin, is_theirs, names_of, origin, origin_of_code, source
from psg_fx.program.flags import Flags
from psg_fx.program.stand_ins import StandIns
from psg_fx.program.values import Same
from psg_fx.torch_private.modes import GRAD_OF_TENSOR, no_modes, without_functions
from psg_fx.torch_private.patching import patched_here, seen_here


@dataclass
class Observed:
    """What was seen: attributes read of modules (by their identity); the code of the user or of packages that ran, with
    its globals; tensors whose values Python looked at.  hidden: modules of psg_fx around the user's, which do not
    count.
    """

    reads: dict[int, tuple[nn.Module, dict[str, None]]] = field(default_factory=dict)
    code: dict[CodeType, dict[str, Any]] = field(default_factory=dict)
    values: dict[Same, None] = field(default_factory=dict)
    kept: dict[Same, tuple[Any, ...]] = field(default_factory=dict)
    """Caches of functions, and what they held for this capture."""
    cached: set[CodeType] = field(default_factory=set)
    """Of this code, that of functions which did not run, since a cache had their results."""
    hidden: tuple[nn.Module, ...] = ()
    refusal: NotYetSupported | None = None
    made: dict[int, set[str]] = field(default_factory=dict)
    """Attributes of modules that the code has set in this run before it read them: what they were does not count."""
    born: dict[int, nn.Module] = field(default_factory=dict)
    """Modules that the code has made in this run, as `nn.NLLLoss(weight)(output, y)` does: nothing of them counts."""

    def sets(self, module: nn.Module, name: str) -> None:
        """An attribute of a module is set."""
        if name not in self.reads.get(id(module), (module, ()))[1]:
            self.made.setdefault(id(module), set()).add(name)

    def read(self, module: nn.Module, name: str) -> None:
        """An attribute of a module is read."""
        if name in self.made.get(id(module), ()) or id(module) in self.born:
            return
        known = self.reads.get(id(module))
        if known is None:
            if any(module is m for m in self.hidden):
                return
            known = self.reads[id(module)] = (module, {})
        known[1].setdefault(name)

    def forget(self, module: nn.Module | None, name: str) -> None:
        """An attribute does not count."""
        if id(module) in self.reads:
            self.reads[id(module)][1].pop(name, None)

    def may_read(self, module: nn.Module | None, name: str) -> bool:
        """Whether an attribute may have been read: of objects that are no modules, this is not known."""
        return module is None or id(module) not in self.reads or name in self.reads[id(module)][1]

    def functions(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Functions that run where no observer sees them, such as the backward of a custom function."""
        for function in functions:
            code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            if code is not None and is_theirs(origin_of_code(code, known)):
                self.code.setdefault(code, known)

    def answered(self, function: Callable[..., Any]) -> None:
        """A function that did not run, since a cache had its result: what it may have read counts, and what functions
        that it names may have.
        """
        waiting: list[Any] = [function]
        while waiting:
            each = waiting.pop()
            code, known = getattr(each, "__code__", None), getattr(each, "__globals__", {})
            if code is None or code in self.code or not is_theirs(origin_of_code(code, known)):
                continue
            self.code[code] = known
            self.cached.add(code)
            names = names_of(code)
            waiting += [known[name] for name in names.read & set(known)]
            for module, read in self.reads.values():
                read.update(dict.fromkeys(names.attributes & set(module.__dict__)))

    def named(self, code: CodeType) -> Any:
        """What is found under the qualified name of a function that ran: the function itself, or a wrapper of it."""
        first, *rest = code.co_qualname.split(".")
        found = self.code[code].get(first)
        for name in rest:
            found = getattr(found, "__dict__", {}).get(name)
        return found


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
_UNREAD = _OF_EVERY_MODULE | {"_flat_weights", "_flat_weight_refs"}
"""What no number follows: recurrent layers list their weights anew whenever these are other tensors."""
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_LAYERS = os.path.join(_TORCH, "nn", "")


@functools.cache
def _is_machinery(file: str) -> bool:
    """Whether a file is of torch, and not of its layers: tracers look at modules of their own, and at the user's."""
    return file.startswith(_TORCH) and not file.startswith(_LAYERS)


_MODULE_FILE = sys.modules[nn.Module.__module__].__file__


@contextlib.contextmanager
def observing(found: Observed, stand_ins: StandIns) -> Iterator[None]:
    """Note what the code that runs in the meantime reads and calls; torch's functions run on what stands in for the
    model's own tensors.
    """
    original: Callable[[Any, str], Any] = nn.Module.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        if name == "__dict__" and sys._getframe(1).f_code.co_filename != _MODULE_FILE:
            for each in ("__dict__", *(set(original(self, "__dict__")) - _OF_EVERY_MODULE)):
                found.read(self, each)
        elif (
            name not in _UNREAD and not name.startswith("__") and not _is_machinery(sys._getframe(1).f_code.co_filename)
        ):
            found.read(self, name)
        return original(self, name)

    def write(self: nn.Module, name: str, value: Any) -> None:
        found.sets(self, name)
        setting(self, name, value)

    def make(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        found.born[id(self)] = self
        making(self, *args, **kwargs)

    profile, setting = _Profile(found), seen_here(nn.Module, "__setattr__")
    making: Callable[..., None] = seen_here(nn.Module, "__init__")
    found.made.clear()
    try:
        with (
            patched_here(nn.Module, "__getattribute__", read), patched_here(nn.Module, "__setattr__", write),
            patched_here(nn.Module, "__init__", make), _Apart(profile, found, stand_ins), profile,
        ):  # fmt: skip
            yield
    finally:
        found.born.clear()
    if found.refusal is not None:
        raise found.refusal


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
    with _Profile(found):
        yield
    if found.refusal is not None:
        raise found.refusal


_LATER = threading.local()
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
        elif before is not None:  # that of cProfile, which is an object with a switch
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
        if not asked or self.found.refusal is not None:
            return
        owner = self.known.get(frame.f_code) or origin_of_code(frame.f_code, frame.f_globals)
        if owner is Origin.USER or (owner is Origin.PACKAGE and asked == RANDOM):
            self.found.refusal = changing(asked, source(frame.f_code.co_filename, frame.f_lineno))


class _Apart(TorchFunctionMode):
    """Nothing is observed inside torch's own functions, which saves most of the time; reads of values are noted, of
    tensors that the code holds and of what is computed from them.
    """

    def __init__(self, profile: _Profile, found: Observed, stand_ins: StandIns) -> None:
        super().__init__()
        self.profile, self.found, self.stand_ins = profile, found, stand_ins
        self.made_of = WeakIdKeyDictionary()
        self.flags = Flags(stand_ins)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == GRAD_OF_TENSOR and origin(sys._getframe(1).f_code.co_filename) is Origin.USER:
            self._refuse_gradient(args[0], sys._getframe(1))
        if not any(isinstance(v, _CALLED) for v in (*args, *kwargs.values())):
            sys.setprofile(None)  # else it calls a function of the user's, as a loss does with a distance
        try:
            if (decided := self.flags.answer(func, args)) is not None:
                self.found.values.update(dict.fromkeys(decided[1]))
                return decided[0]
            if func in _INDEXING and len(args) > 1:
                args = (args[0], self._indexed(args[1]), *args[2:])
            own = args, kwargs
            args, kwargs = self.stand_ins.given(tuple(args)), self.stand_ins.given(kwargs)
            held = self._held((*args, *kwargs.values()))
            if func in _LOOKS:
                self.found.values.update(dict.fromkeys(held))
            result = func(*args, **kwargs)
            if held:
                for made in result if isinstance(result, (tuple, list)) else (result,):
                    if isinstance(made, torch.Tensor):
                        self.made_of[made] = held
            self.flags.computed(func, *own, result)
            return self.stand_ins.own(result)
        finally:
            sys.setprofile(self.profile)

    def _indexed(self, index: Any) -> Any:
        """An index whose slices are bounded by numbers: torch reads those of tensors unseen."""
        if isinstance(index, tuple):
            return tuple(map(self._indexed, index))
        if isinstance(index, slice):
            return slice(*(self._bound(bound) for bound in (index.start, index.stop, index.step)))
        return index

    def _bound(self, bound: Any) -> Any:
        if not isinstance(bound, torch.Tensor):
            return bound
        decided = self.flags.answer(torch.Tensor.__index__, (bound,))
        if decided is None and type(bound) in _FROM_OUTSIDE and not self.flags.has(bound):
            with no_modes(), without_functions():
                decided = int(bound), [Same(bound)]
        if decided is None:
            return self.stand_ins.given(bound)
        self.found.values.update(dict.fromkeys(decided[1]))
        return decided[0]

    def _refuse_gradient(self, tensor: Any, frame: FrameType) -> None:
        """What lies in `.grad` of a tensor from outside is the value of one call."""
        if self._held((tensor,)) and tensor.is_leaf and self.found.refusal is None:
            self.found.refusal = NotYetSupported(
                "the code reads .grad of a tensor", where=source(frame.f_code.co_filename, frame.f_lineno),
                why="what lies there changes with every backward pass, and a graph would hold it for ever",
                fix="pass it as an input, or keep a copy in a buffer",
            )  # fmt: skip

    def _held(self, arguments: Iterable[Any]) -> dict[Same, None]:
        """The tensors that the code holds among the arguments, and those that the others were computed from."""
        found: dict[Same, None] = {}
        for value in arguments:
            if type(value) in _FROM_OUTSIDE:
                found[Same(value)] = None
            if isinstance(value, torch.Tensor):
                found.update(self.made_of.get(value, {}))
            elif isinstance(value, (tuple, list)):
                found.update(self._held(value))
        return found


_FROM_OUTSIDE = (torch.Tensor, nn.Parameter)
"""What tensors are that no capture has made."""
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_CALLED = (FunctionType, MethodType, functools.partial, nn.Module)
_LOOKS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__complex__")
}
