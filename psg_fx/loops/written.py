"""Python values as texts that are equal in another process where the values are."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from psg_fx.digests import digest, fingerprint
from psg_fx.loops.code import changed_by, is_followed, settings_of, stored_by, written_code
from psg_fx.program.code import Origin, names_of, origin_of_module
from psg_fx.program.objects import MISSING, contents, functions_of, is_array, slots_of
from psg_fx.program.reads.walk import HOOKS
from psg_fx.tensors import short_name

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size, range,
          type(Ellipsis))  # fmt: skip
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
            types.ClassMethodDescriptorType)  # fmt: skip
_LONG, _FEW = 300, 8
_DEEP = 2
"""Objects inside settings are looked into so far.  In code, at 0, lists and dicts are not either: code fills them."""


class Texts:
    """What values are, without addresses: functions and classes by name, tensors by their values or a fingerprint.

    code: a fingerprint of the code of every function and class that came up, by name.  What cannot be looked into
    counts by its type alone.

    known: modules that are written down elsewhere, with what they are called.
    """

    def __init__(self, known: Mapping[nn.Module, str]) -> None:
        self._known = {id(module): name for module, name in known.items()}
        self._stored = {name for module in known for name in changed_by(module, "forward", elsewhere=True)}
        self._apart: dict[int, str] = {}
        self._digests: dict[str, list[str]] = {}
        self._met: dict[tuple[int, bool], str] = {}
        self._alive: list[Any] = []
        self._open: set[int] = set()
        self._deep = _DEEP

    @property
    def code(self) -> dict[str, str]:
        """Name -> fingerprint; of several by one name: -> fingerprints."""
        return {name: " ".join(found) for name, found in self._digests.items()}

    def text(self, value: Any) -> str:
        """One value."""
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, _PLAIN):
            return hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value)
        if id(value) in self._known:
            return self._known[id(value)]
        key = id(value), self._deep > 0
        if key not in self._met:
            if id(value) in self._open:
                return f"{type(value).__qualname__} again"  # inside of itself
            self._open.add(id(value))
            self._alive.append(value)
            found = self._look(value)
            self._open.remove(id(value))
            self._met[key] = found if len(found) <= _LONG else f"{found[:_LONG]}... ({digest(found)})"
        return self._met[key]

    def _look(self, value: Any) -> str:
        for kinds, look in _LOOKS:
            if isinstance(value, kinds):
                return look(self, value)
        if is_array(value):
            return f"array({list(value.shape)}, {value.dtype}, {digest(value.tobytes())})"
        return self._object(value)

    @contextlib.contextmanager
    def _at(self, deep: int) -> Iterator[None]:
        before, self._deep = self._deep, deep
        try:
            yield
        finally:
            self._deep = before

    def _noted(self, name: str, text: str) -> str:
        """The name under which code is noted; a second code of one name has a number."""
        found = self._digests.setdefault(name, [])
        if (own := digest(text)) not in found:
            found.append(own)
        number = found.index(own) + 1
        return name if number == 1 else f"{name} ({number})"

    def _tensor(self, value: torch.Tensor) -> str:
        dtype = short_name(value.dtype)
        if value.layout is torch.strided and 0 < value.numel() <= _FEW and not value.is_meta:
            return f"tensor({value.tolist()}, {dtype})"
        return f"tensor({list(value.shape)}, {dtype}, {fingerprint(value)})"

    def _partial(self, value: functools.partial[Any]) -> str:
        given = [*map(self.text, value.args), *(f"{name}={self.text(v)}" for name, v in value.keywords.items())]
        return f"partial of {self.text(value.func)} with {', '.join(given)}"

    def _method(self, value: MethodType) -> str:
        return f"{self.text(value.__func__)} of {self.text(value.__self__)}"

    def _function(self, value: FunctionType) -> str:
        name, held = f"{value.__module__}.{value.__qualname__}", self._held(value)
        if is_followed(value.__globals__.get("__name__")):
            name = self._noted(name, self._code(value))
        return f"{name} with {', '.join(held)}" if held else name

    def _held(self, value: FunctionType) -> list[str]:
        """What a function has from where it was made: variables around it, and defaults."""
        own, code = is_followed(value.__globals__.get("__name__")), value.__code__
        with self._at(self._deep if own else 0):
            cells = zip(code.co_freevars, map(contents, value.__closure__ or ()), strict=True)
            found = [f"{name}={self.text(held)}" for name, held in cells if held is not MISSING]
            if own:
                found += [f"default {self.text(v)}" for v in value.__defaults__ or ()]
                found += [f"{name}={self.text(v)}" for name, v in (value.__kwdefaults__ or {}).items()]
        return found

    def _code(self, value: FunctionType) -> str:
        """A function's code, and the functions, classes and modules that it has by names of its file, if that is the
        user's.
        """
        known, parts = value.__globals__, [written_code(value.__code__)]
        if "__name__" not in known or origin_of_module(known["__name__"]) is Origin.USER:
            with self._at(0):
                for name in sorted(names_of(value.__code__).read):
                    found = known.get(name)
                    if isinstance(found, FunctionType):  # by name, whether it is being written already or not
                        self.text(found)
                        parts.append(f"{name}={found.__module__}.{found.__qualname__} {self._held(found)}")
                    elif isinstance(found, (type, nn.Module, functools.partial)):
                        parts.append(f"{name}={self.text(found)}")
        return "".join(parts)

    def kind(self, value: type) -> str:
        """A class: its name, its code and that of classes before it, as far as it counts."""
        name = f"{value.__module__}.{value.__qualname__}"
        if not is_followed(value.__module__):
            return value.__qualname__ if value.__module__.startswith("psg_fx.") else name
        self._met[id(value), True] = self._met[id(value), False] = name  # its methods name it
        with self._at(0):
            before = [self.text(owner) for owner in value.__bases__ if is_followed(owner.__module__)]
            name = self._noted(name, repr((before, list(self._inside(value)))))
        self._met[id(value), True] = self._met[id(value), False] = name
        return name

    def _inside(self, kind: type) -> Iterator[str]:
        """The methods of a class, and its plain attributes but those that a method stores."""
        held = {name: functions_of(value) for name, value in vars(kind).items()}
        changed = stored_by([f for functions in held.values() for f in functions], kind)
        for name, functions in held.items():
            for function in functions:
                yield f"{name}: {self._code(function)} {self._held(function)}"
            value = vars(kind)[name]
            if not functions and not name.startswith("__") and name not in changed and self._is_settled(value):
                yield f"{name} = {self.text(value)}"

    def _is_settled(self, value: Any) -> bool:
        """Whether it is a value that code cannot change where it is, or a tensor, a dataclass or a module."""
        if isinstance(value, (tuple, frozenset)):
            return all(map(self._is_settled, value))
        kinds = (*_PLAIN, enum.Enum, torch.Tensor, FunctionType, MethodType, functools.partial, type, nn.Module,
                 *_BUILTIN)  # fmt: skip
        return isinstance(value, kinds) or dataclasses.is_dataclass(value) or is_array(value)

    def attributes(self, module: nn.Module, name: str = "") -> dict[str, str]:
        """What a module holds besides parameters, buffers and modules, and no forward changes; its hooks.  Of a
        dataclass, such as the settings of a whole model, each field; where it comes up again, the first of its names.
        """
        found: dict[str, str] = {}
        with self._at(0):
            for own, value in settings_of(module, "forward").items():
                if dataclasses.is_dataclass(value) and not isinstance(value, type):
                    found |= self._fields_apart(value, own, f"{name}.{own}".removeprefix("."))
                elif self._is_settled(value):
                    found[own] = self.text(value)
            hooks = [f"{kind}: {self.text(hook)}" for kind in HOOKS for hook in vars(module).get(kind, {}).values()]
        return found | ({"hooks": ", ".join(hooks)} if hooks else {})

    def _fields_apart(self, value: Any, own: str, name: str) -> dict[str, str]:
        """Each field of a dataclass for itself."""
        first = self._apart.setdefault(id(value), name)
        if first != name:
            return {own: f"as {first}"}
        self._alive.append(value)
        kept = {n: held for n, held in _fields(value).items() if n not in self._stored}
        return {own: self.text(type(value))} | {f"{own}.{n}": self.text(held) for n, held in kept.items()}

    def _module(self, module: nn.Module) -> str:
        """A module that is not written down elsewhere."""
        parts = [f"training={module.training}", *(f"{name}={text}" for name, text in self.attributes(module).items())]
        for held in (module._parameters, module._buffers, module._modules):
            parts += [f"{name}={self.text(value)}" for name, value in held.items()]
        return f"{self.text(type(module))}({', '.join(parts)})"

    def _mapping(self, value: Mapping[Any, Any]) -> str:
        if not self._deep:
            return self.text(type(value))
        return f"{{{', '.join(f'{self.text(k)}: {self.text(v)}' for k, v in value.items())}}}"

    def _container(self, value: Any) -> str:
        if not self._deep and isinstance(value, (list, set)):
            return self.text(type(value))
        parts = list(map(self.text, value))
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)})"

    def _object(self, value: Any) -> str:
        """Any other object: its attributes by name."""
        if isinstance(value, _BUILTIN):
            return self._builtin(value)
        if isinstance(value, (OpOverload, OpOverloadPacket)):
            return str(value)
        kind, own = self.text(type(value)), {}
        if dataclasses.is_dataclass(value):
            own = _fields(value)
        elif self._deep:
            own = settings_of(value, "__call__") if hasattr(value, "__dict__") else {}
            own |= {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
        with self._at(max(self._deep - 1, 0)):
            parts = [f"{n}={self.text(held)}" for n, held in own.items() if n not in functools.WRAPPER_ASSIGNMENTS]
        return f"{kind}({', '.join(parts)})"

    def _builtin(self, value: Any) -> str:
        """A function that is not written in Python: its name, and what it is a method of."""
        owner = getattr(value, "__self__", None)
        name = f"{getattr(value, '__module__', None) or 'builtins'}.{value.__qualname__}"
        return name if owner is None or isinstance(owner, types.ModuleType) else f"{name} of {self.text(owner)}"


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}


_LOOKS: tuple[tuple[Any, Callable[[Texts, Any], str]], ...] = (
    (torch.Tensor, Texts._tensor),
    (functools.partial, Texts._partial),
    (FunctionType, Texts._function),
    (MethodType, Texts._method),
    (type, Texts.kind),
    (nn.Module, Texts._module),
    (Mapping, Texts._mapping),
    ((tuple, list, set, frozenset), Texts._container),
)
