"""Code as text that is the same in every process, and what a module's forward changes."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from psg_fx.program.code import Origin, nested, origin_of_module
from psg_fx.program.objects import contents, functions_of
from psg_fx.program.reads.walk import HOOKS

_OF_BASE = frozenset(vars(nn.Module()))


def is_followed(module: str | None) -> bool:
    """Whether code of a module of Python counts: not that of torch, of psg_fx and of the standard library."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names:
        return origin_of_module(module or "") is Origin.USER  # a file of the user's that has such a name
    return top not in ("torch", "psg_fx")


def written_code(code: CodeType) -> str:
    """Instructions, names and constants."""
    return repr((code.co_name, code.co_code, code.co_names, [_constant(c) for c in code.co_consts]))


def _constant(value: Any) -> str:
    """A constant of code, alike in every process: sets have an order of their own in each."""
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant(v) for v in value]
        return repr(parts if isinstance(value, tuple) else sorted(parts))
    return written_code(value) if isinstance(value, CodeType) else repr(value)


@dataclass(frozen=True)
class _Names:
    """The attributes that code stores or deletes (elsewhere: of others than its first argument), and those it reads."""

    stored: frozenset[str]
    elsewhere: frozenset[str]
    read: frozenset[str]


@functools.cache
def _names(code: CodeType) -> _Names:
    stored, elsewhere, read = set(), set(), set()
    for inner in nested(code):
        before: Any = None
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
                stored.add(instruction.argval)
                if not _is_first_argument(before, inner):
                    elsewhere.add(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                read.add(instruction.argval)
            before = instruction
    return _Names(frozenset(stored), frozenset(elsewhere), frozenset(read))


def _is_first_argument(instruction: dis.Instruction | None, code: CodeType) -> bool:
    """Whether an instruction loads, last of all, the first argument of the code: `self`."""
    if instruction is None or not instruction.opname.startswith("LOAD_FAST") or not code.co_varnames:
        return False
    loaded: Any = instruction.argval
    last: str = loaded[-1] if isinstance(loaded, tuple) else loaded
    return last == code.co_varnames[0]


def stored_by(functions: Iterable[FunctionType], kind: type, elsewhere: bool = False) -> set[str]:
    """The attributes that functions store, and the methods of a class that they name, and so on.  elsewhere: those of
    other objects alone, as in `self.config.kind = ..`.
    """
    todo, met, found = list(functions), set[CodeType](), set[str]()
    while todo:
        function = todo.pop()
        if function.__code__ in met:
            continue
        met.add(function.__code__)
        names = _names(function.__code__)
        found |= names.elsewhere if elsewhere else names.stored
        todo += [f for name in names.read for f in _methods(kind, name)]
        todo += [f for cell in function.__closure__ or () for f in functions_of(contents(cell))]  # what it decorates
    return found


def _methods(kind: type, name: str) -> Iterator[FunctionType]:
    """What a name means in a class and in those before it, which `super()` reaches."""
    for owner in kind.__mro__:
        if owner not in (nn.Module, object):
            yield from functions_of(vars(owner).get(name))


def settings_of(value: Any, calls: str) -> dict[str, Any]:
    """Attributes of an object but those that change by themselves: that the method `calls`, its hooks, or methods that
    they name store, and cached properties.
    """
    kind, own = type(value), vars(value)
    changed = changed_by(value, calls)
    return {
        name: held for name, held in own.items()
        if name not in changed and not (isinstance(value, nn.Module) and name in _OF_BASE)
        and not any(isinstance(vars(owner).get(name), functools.cached_property) for owner in kind.__mro__)
    }  # fmt: skip


def changed_by(value: Any, calls: str, elsewhere: bool = False) -> set[str]:
    """The attributes that the method `calls` of an object stores, its hooks, or methods that they name."""
    kind, own = type(value), vars(value)
    hooks = [hook for name in HOOKS for hook in own.get(name, {}).values()] if isinstance(value, nn.Module) else []
    roots = [getattr(f, "__func__", f) for f in (*hooks, own.get(calls))]
    return stored_by([*_methods(kind, calls), *(f for f in roots if isinstance(f, FunctionType))], kind, elsewhere)
