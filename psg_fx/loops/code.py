"""Code as text that is the same in every process, and what a module's forward changes."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
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


@functools.cache
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that code stores or deletes, and those that it reads."""
    stored, read = set(), set()
    for inner in nested(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
                stored.add(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                read.add(instruction.argval)
    return frozenset(stored), frozenset(read)


def stored_by(functions: Iterable[FunctionType], kind: type) -> set[str]:
    """The attributes that functions store, and the methods of a class that they name, and so on."""
    todo, met, found = list(functions), set[CodeType](), set[str]()
    while todo:
        function = todo.pop()
        if function.__code__ in met:
            continue
        met.add(function.__code__)
        stored, read = _names(function.__code__)
        found |= stored
        todo += [f for name in read for f in _methods(kind, name)]
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
    hooks = [hook for name in HOOKS for hook in own.get(name, {}).values()] if isinstance(value, nn.Module) else []
    roots = [getattr(f, "__func__", f) for f in (*hooks, own.get(calls))]
    changed = stored_by([*_methods(kind, calls), *(f for f in roots if isinstance(f, FunctionType))], kind)
    return {
        name: held for name, held in own.items()
        if name not in changed and not (isinstance(value, nn.Module) and name in _OF_BASE)
        and not any(isinstance(vars(owner).get(name), functools.cached_property) for owner in kind.__mro__)
    }  # fmt: skip
