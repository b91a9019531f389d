"""What was seen of code while it was captured: `observe` fills it in, `walk` follows what it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

from psg_fx.errors import NotYetSupported
from psg_fx.program.code import is_theirs, names_of, origin_of_code
from psg_fx.program.decisions.questions import MOST, Question
from psg_fx.program.values import Same


@dataclass
class Observed:
    """What was seen: attributes read of modules (by their identity); the code of the user or of packages that ran, with
    its globals; tensors whose values Python looked at, with what it asked (None: for the values themselves).  hidden:
    modules of psg_fx around the user's, which do not count.
    """

    reads: dict[int, tuple[nn.Module, dict[str, None]]] = field(default_factory=dict)
    code: dict[CodeType, dict[str, Any]] = field(default_factory=dict)
    values: dict[Same, list[Question] | None] = field(default_factory=dict)
    kept: dict[Same, tuple[Any, ...]] = field(default_factory=dict)
    """Caches of functions, and what they held for this capture."""
    cached: set[CodeType] = field(default_factory=set)
    """Of this code, that of functions which did not run, since a cache had their results."""
    calls: list[Any] = field(default_factory=list)
    """Calls of custom functions that graphs of this capture have as ops."""
    counted: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)
    """Numbers of which the type alone counts, since every step computes on with them: where, names, for messages."""
    hidden: tuple[nn.Module, ...] = ()
    refusal: NotYetSupported | None = None
    made: dict[int, set[str]] = field(default_factory=dict)
    """Attributes of modules that the code has set in this run before it read them: what they were does not count."""
    assigned: set[tuple[int, str]] = field(default_factory=set)
    """All attributes of modules that the code has set in this run."""
    born: dict[int, nn.Module] = field(default_factory=dict)
    """Modules that the code has made in this run, as `nn.NLLLoss(weight)(output, y)` does: nothing of them counts."""

    def looks(self, tensor: Same, question: Question | None = None) -> None:
        """Python looks at a tensor's value, or asks something of it."""
        asked = self.values.setdefault(tensor, [])
        if question is None or asked is None or len(asked) == MOST:
            self.values[tensor] = None
        else:
            asked.append(question)

    def looks_at_number(self, tensor: Any) -> None:
        """Torch reads a number out of a tensor in a backward pass."""
        if type(tensor) in (torch.Tensor, nn.Parameter):
            self.looks(Same(tensor))

    def sets(self, module: nn.Module, name: str) -> None:
        """An attribute of a module is set."""
        self.assigned.add((id(module), name))
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

    def read_behind(self, module: nn.Module, name: str) -> None:
        """An attribute of a module is read in a backward pass, which runs where the forward has been taken back."""
        if (id(module), name) in self.assigned:
            self.refusal = self.refusal or NotYetSupported(
                f"a backward pass reads {name}, which the forward pass sets",
                where=f"{type(module).__name__}.{name}",
                why="it would find there what another call has left",
                fix="keep it in a local variable that the function closes over, or in ctx.save_for_backward",
            )
        self.read(module, name)

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
