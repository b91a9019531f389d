"""What a function has of the functions around it, by default and bound: read, and put in its place again."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from psg_fx.program.code import nested


class Closure:
    """A function that equals another one of the same code that has equal values: each run of the code around makes
    functions anew.

    read: the tensors among those values of which `counts` says so, within functions, `functools.partial`, tuples,
    lists and dicts, too.
    """

    def __init__(self, function: Callable[..., Any], counts: Callable[[torch.Tensor], bool]) -> None:
        self.function = function
        found = _Values()
        found.again(function)
        self.read = [tensor for tensor in found.tensors.values() if counts(tensor)]
        self.fixed = found.fixed

    def on(self, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """The function where these are the tensors."""
        if not self.read:
            return self.function
        instead = {id(old): new for old, new in zip(self.read, tensors, strict=True)}
        found: Callable[..., Any] = _Values(instead).again(self.function)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Closure) or len(self.fixed) != len(other.fixed):
            return False
        return self.function == other.function or all(map(_same, self.fixed, other.fixed))

    def __hash__(self) -> int:
        return 0


def _same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


_PLAIN = (bool, int, float, complex, str, bytes, CodeType, torch.dtype, torch.device, torch.Size)


class _Values:
    """The values in a function.  instead: of tensors, by their identity.  fixed: what is no tensor, in order."""

    def __init__(self, instead: dict[int, torch.Tensor] | None = None) -> None:
        self.instead = instead or {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.fixed: list[Any] = []
        self._around: list[int] = []

    def again(self, value: Any) -> Any:
        """The same with other tensors in it."""
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return self.instead.get(id(value), value)
        look = _LOOKS.get(type(value))
        if look is None or id(value) in self._around:
            self.fixed.append(value)
            return value
        self._around.append(id(value))
        found = look(self, value)
        self._around.pop()
        return found

    def all(self, values: Any) -> tuple[Any, ...]:
        """Those of several."""
        return tuple(map(self.again, values or ()))

    def named(self, values: Any) -> dict[str, Any]:
        """Those of a dict."""
        return {name: self.again(value) for name, value in (values or {}).items()}

    def function(self, value: FunctionType) -> FunctionType:
        """A function of the same code."""
        self.fixed.append(value.__code__)
        cells = tuple(CellType(self.again(cell.cell_contents)) for cell in value.__closure__ or ())
        made = FunctionType(
            value.__code__, value.__globals__, value.__name__, self.all(value.__defaults__), cells or None
        )
        made.__kwdefaults__ = self.named(value.__kwdefaults__)
        return made

    def partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        """A partial of the same function."""
        return functools.partial(self.again(value.func), *self.all(value.args), **self.named(value.keywords))


_LOOKS: dict[type, Callable[[_Values, Any], Any]] = {
    FunctionType: _Values.function,
    MethodType: lambda values, value: MethodType(values.again(value.__func__), value.__self__),
    functools.partial: _Values.partial,
    tuple: _Values.all,
    list: lambda values, value: list(values.all(value)),
    dict: _Values.named,
}


def changes_state(function: Callable[..., Any]) -> bool:
    """Whether the code of a function says of itself that it sets a variable from outside of it, or an attribute."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return any(
        instruction.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL")
        or (instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars)
        for inner in nested(code)
        for instruction in dis.get_instructions(inner)
    )
