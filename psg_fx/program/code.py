"""Whose code a file is, and which names a function's code mentions."""

from __future__ import annotations

import dis
import enum
import functools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from psg_fx.source import is_library


class Origin(enum.Enum):
    """Who wrote a file: torch or psg_fx, Python's standard library, an installed package, or the user."""

    COMPILER = "torch or psg_fx"
    STANDARD = "the standard library"
    PACKAGE = "an installed package"
    USER = "the user"


_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OF_TORCH = tuple(f"{os.sep}{name}{os.sep}" for name in ("sympy", "mpmath", "numpy"))
"""Packages that torch calculates sizes with: they count as the standard library."""
_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


@functools.cache
def origin(file: str) -> Origin:
    """Whose a file is.  Functions that Python itself writes (of a dataclass, say) count as the library's."""
    if is_library(file):
        return Origin.COMPILER if file.endswith(".py") or file.startswith("<eval") else Origin.STANDARD
    if any(part in file for part in _PACKAGES):
        return Origin.STANDARD if any(part in file for part in _OF_TORCH) else Origin.PACKAGE
    return Origin.STANDARD if file.startswith(_STANDARD) else Origin.USER


def origin_of_module(name: str) -> Origin:
    """Whose the module of this name is; one that nobody has imported is the user's, who may have made it otherwise."""
    module = sys.modules.get(str(name))
    return Origin.USER if module is None else origin_of(module)


def origin_of(module: ModuleType) -> Origin:
    """Whose a module is, by the file or folder that it was loaded from; one without either is the standard library's,
    if that has imported it, and else the user's.
    """
    file = getattr(module, "__file__", None)
    if file is None and (folders := getattr(module, "__path__", None)):
        file = os.path.join(next(iter(folders), ""), "__init__.py")
    if file is None:
        return Origin.USER if module.__name__ == "__main__" or module.__spec__ is None else Origin.STANDARD
    return origin(file)


def origin_of_code(code: CodeType, known: Mapping[str, Any]) -> Origin:
    """Whose a function's code is, which runs among the globals `known`: code without a file, such as that of `python
    -c`, of `exec`, or of what the standard library writes for a class, is whose these are.
    """
    if code.co_filename != "<string>":
        return origin(code.co_filename)
    return origin_of_module(known["__name__"]) if "__name__" in known else Origin.USER


def is_theirs(owner: Origin) -> bool:
    """Whether code is followed: that of the user and of packages."""
    return owner in (Origin.USER, Origin.PACKAGE)


@dataclass(frozen=True)
class Names:
    """What a function's code mentions, that of the functions inside it included.

    read: the globals that it reads.  attributes: every name that may be an attribute's, constants of text among them.
    modules: those that it imports, and what may be one's name by which it asks for one.
    open: it may reach attributes by names that its code does not have.
    """

    read: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    open: bool


_OPENING = {
    "getattr", "attrgetter", "methodcaller", "vars", "__dict__", "__getattribute__", "globals", "locals", "eval",
    "exec", "asdict", "astuple", "fields", "getmembers",
}  # fmt: skip


_BY_NAME = {"modules", "import_module", "__import__"}
"""What finds a module by a name that is a text."""


@functools.cache
def names_of(code: CodeType) -> Names:
    """The names in a code object."""
    read, attributes, modules, texts, matches = set(), set(), set(), set(), False
    for inner in nested(code):
        texts |= {c for c in inner.co_consts if isinstance(c, str)}
        texts |= {c for held in inner.co_consts if isinstance(held, tuple) for c in held if isinstance(c, str)}
        attributes |= {*inner.co_names, *filter(str.isidentifier, texts)}
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                modules.add(instruction.argval)
            matches |= instruction.opname == "MATCH_CLASS"  # by position: `__match_args__` has the names
    if "globals" in attributes:
        read |= texts
    if attributes & _BY_NAME:
        modules |= texts
    return Names(frozenset(read), frozenset(attributes), frozenset(modules), matches or bool(_OPENING & attributes))


def nested(code: CodeType) -> Iterator[CodeType]:
    """The code and that of all functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def line_naming(codes: Iterator[CodeType], name: str) -> str:
    """The first line of these that mentions a name: `model.py:17: self.calls += 1`; first those that store an attribute
    of this name, then others that store it.
    """
    found: dict[int, str] = {}
    for code in codes:
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            line = instruction.starts_line or line if not isinstance(instruction.starts_line, bool) else line
            if instruction.argval != name:
                continue
            kind = 0 if instruction.opname == "STORE_ATTR" else 1 if instruction.opname.startswith("STORE") else 2
            found.setdefault(kind, source(code.co_filename, line))
    return found[min(found)] if found else ""


def source(file: str, line: int) -> str:
    """`model.py:17: self.calls += 1`."""
    return f"{os.path.basename(file)}:{line}: {linecache.getline(file, line).strip()}"


def users_frame(frame: FrameType) -> FrameType:
    """The frame of the user's code that one of torch or psg_fx was reached from."""
    return next((f for f, _ in traceback.walk_stack(frame) if not is_library(f.f_code.co_filename)), frame)


def users_line(frame: FrameType) -> str:
    """The line of the user's code that a frame of torch or psg_fx was reached from."""
    return line_of(users_frame(frame))


def line_of(frame: FrameType) -> str:
    """`model.py:17: if x.shape[0] > 4:`."""
    return source(frame.f_code.co_filename, frame.f_lineno)
