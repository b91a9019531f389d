"""Numbers that code counts on with, and reads for nothing else: `self.calls += 1`.

Whether it does is tried.  While the code runs, something stands in the place of the number that can be computed with,
and keeps how; what would need to know the number is refused it, and noted, should the code go on all the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from psg_fx.graph.facts import expr
from psg_fx.program.changes.holders import Holder
from psg_fx.torch_private.symbols import depends_on_values

_OPERANDS = (int, float, torch.SymInt)


class NumberRead(Exception):
    """Code needs to know a number that it changes."""


@dataclass(frozen=True)
class Counted:
    """A number as a call has left it, from what it was before the call: what has been computed, step by step."""

    steps: tuple[Callable[[Any, Any], Any], ...] = ()
    operands: tuple[Any, ...] = ()

    def after(self, number: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
        """The number after a call.  sizes: how many samples the call has, and rows of each axis."""
        for step, operand in zip(self.steps, self.operands, strict=True):
            number = step(number, int(operand.subs(sizes)) if isinstance(operand, sympy.Expr) else operand)
        return number

    def of_graph(self, known: Callable[[sympy.Expr], sympy.Expr]) -> Counted:
        """The same, by the sizes of a graph.  known: says sizes of the code's run by those."""
        return Counted(self.steps, tuple(known(v) if isinstance(v, sympy.Expr) else v for v in self.operands))


@dataclass(eq=False)
class Counter:
    """What stands in the place of a number that a module holds.  reads: what code has asked of it, of any of them."""

    owner: Any
    key: str
    reads: list[str]
    kind: type
    counted: Counted = field(default_factory=Counted)

    def with_step(self, step: Callable[[Any, Any], Any], operand: Any) -> Counter:
        """The number that is computed of it and another one."""
        if not isinstance(operand, _OPERANDS) or depends_on_values(operand):
            self.read(step.__name__)
        operand = expr(operand) if isinstance(operand, torch.SymInt) else operand
        known = self.counted
        return Counter(
            self.owner, self.key, self.reads, self.kind, Counted((*known.steps, step), (*known.operands, operand))
        )

    def is_as_before(self) -> bool:
        """Whether nothing has been computed of it."""
        return not self.counted.steps

    def counts(self, owner: Any, key: Any) -> bool:
        """Whether it is made of the number that this is."""
        return self.owner is owner and key == self.key

    def read(self, what: str) -> Any:
        """Refuse to be read."""
        self.reads.append(what)
        raise NumberRead(f"{type(self.owner).__name__}.{self.key} is read ({what})")

    def __getattr__(self, name: str) -> Any:
        return self.read(name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the number: `isinstance(n, int)` is as ever."""
        return self.kind


def _computing(step: Callable[[Any, Any], Any]) -> Callable[[Counter, Any], Counter]:
    return lambda self, operand: self.with_step(step, operand)


def _reflected(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def reflected(number: Any, operand: Any) -> Any:
        return step(operand, number)

    return reflected


def _reading(name: str) -> Callable[..., Any]:
    return lambda self, *_: self.read(name)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _step = getattr(operator, _name)
    setattr(Counter, f"__{_name}__", _computing(_step))
    setattr(Counter, f"__r{_name}__", _computing(_reflected(_step)))
for _name in (
    "bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "index", "int", "float", "complex", "str", "repr", "format",
    "abs", "neg", "pos", "invert", "round", "trunc", "floor", "ceil", "divmod", "rdivmod", "and", "or", "xor", "rand",
    "ror", "rxor", "lshift", "rshift", "rlshift", "rrshift", "reduce_ex", "copy", "deepcopy",
):  # fmt: skip
    setattr(Counter, f"__{_name}__", _reading(_name))


def is_counter(value: Any) -> bool:
    """Whether a value stands in the place of a number; what asks a class is told that of the number."""
    return type(value) is Counter


def stand_in(holder: Holder, labels: frozenset[str], reads: list[str]) -> list[str]:
    """Put counters in the place of the numbers of a module that have one of these labels.  Returns their names."""
    owner = holder.owner
    names = [key for key, value in holder.before.items() if type(value) in (int, float)] if owner is not None else []
    found = [key for key in names if f"{holder.label}.{key}" in labels]
    for key in found:
        holder.put(key, Counter(owner, key, reads, type(holder.before[key])))
    return found
