"""All that can be reached from a model and its loss, and may change while their code runs."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from psg_fx.program.changes.holders import (
    Holder,
    of_array,
    of_attributes,
    of_cell,
    of_class,
    of_dict,
    of_hooks,
    of_items,
    of_list,
    of_module,
    of_slots,
)
from psg_fx.program.code import Origin, is_theirs, nested, origin_of, origin_of_code, origin_of_module
from psg_fx.program.objects import (
    MISSING,
    attribute_dict,
    contents,
    is_array,
    keep_in_cache,
    keys_of_cache,
    objects_of_cache,
    slots_of,
)
from psg_fx.torch_private.fakes import FakeTensor

_MOST = 500_000
_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of every module, which torch.export changes itself and puts back."""
_MAY_HAVE_OWN = (list, dict, set, tuple, frozenset, collections.deque, functools.partial)
"""What has attributes where its class is the user's, or always."""
_LARGE = 1 << 24
"""Bytes of an array that is not copied to see whether the code writes to it."""
NUMBERS = (bool, int, float, str, bytes, type(None))
"""Types of plain values, which hold nothing."""
_ATOMS = (*NUMBERS, torch.Tensor, nn.Parameter)
_PLAIN_HOLDERS = (list, dict, set, FunctionType)
_LOOKED_INTO = ("types", "argparse", "collections", "dataclasses", "enum", "configparser", "string")


class Reached:
    """All that code can reach from the roots, as it is before the code runs.

    generators: those of numpy's, and their states.  caches: of functions (`functools.lru_cache`), and how often they
    were asked, and for what.  tensors: where they are looked for.  modules: with their parameters and modules.
    """

    def __init__(self, roots: Sequence[Any], with_tensors: bool = False) -> None:
        self._atoms = NUMBERS if with_tensors else _ATOMS
        self.tensors: list[torch.Tensor] = []
        self.modules: list[tuple[nn.Module, Mapping[str, Any], Mapping[str, Any]]] = []
        self.holders: list[Holder] = []
        self.generators: list[tuple[Any, str]] = []
        self.caches: list[tuple[Any, Any, frozenset[Any]]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._waiting: collections.deque[tuple[Any, str]] = collections.deque((r, type(r).__name__) for r in roots)
        while self._waiting and len(self._alive) < _MOST:
            value, name = self._waiting.popleft()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._alive.append(value)
                self._look(value, name)

    def changes(self) -> list[tuple[Holder, Any]]:
        """The holders whose values are others now, and those."""
        found = [(h, h.read()) for h in self.holders]
        return [(h, now) for h, now in found if not h.is_as_before(now)]

    def put_back(self) -> list[tuple[Holder, Any]]:
        """All is as it was, what caches held, too.  Returns `changes()`."""
        changes = self.changes()
        for holder, _ in changes:
            holder.write(holder.before)
        for cache, info, keys in self.caches:
            if cache.cache_info().misses != info.misses:
                keep_in_cache(cache, keys)
        return changes

    def take_out(self) -> str:
        """Parameters and modules with tensors that the code has made are none of the model's any more.  The name of the
        first: `Net.weight`; "" for none.
        """
        found = []
        for module, parameters, modules in self.modules:
            for held, known in ((module._parameters, parameters), (module._modules, modules)):
                made = [n for n, new in held.items() if n not in known and _of_a_capture(new)]
                found += [f"{type(module).__name__}.{name}" for name in made]
                for name in made:
                    del held[name]
        return found[0] if found else ""

    def put_members_back(self) -> str:
        """Parameters, and modules with tensors, that the code has put in the place of others, or taken off, are as they
        were.  The name of the first; "" for none.
        """
        found = []
        for module, parameters, modules in self.modules:
            own = vars(module)  # export shows proxies of modules that have two names
            for held, known in ((own["_parameters"], parameters), (own["_modules"], modules)):
                changed = [n for n, value in known.items() if held.get(n, MISSING) is not value]
                changed = [n for n in changed if _has_tensors(known[n]) or _has_tensors(held.get(n))]
                found += [f"{type(module).__name__}.{name}" for name in changed]
                if changed:
                    held.clear()
                    held.update(known)
        return found[0] if found else ""

    def _look(self, value: Any, name: str) -> None:
        if isinstance(value, nn.Module):
            self._of_module(value)
        elif isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.UntypedStorage):
            return
        elif isinstance(value, FunctionType):
            self._of_function(value)
        elif isinstance(value, list):
            self._holds(of_list(value, name), value)
        elif isinstance(value, collections.deque):
            self._holds(of_items(value, name, value.extend), value)
        elif isinstance(value, dict):
            self.holders.append(of_dict(value, name, name))
            self._wait(self.holders[-1].before)
        elif isinstance(value, set):
            self._holds(of_items(value, name, value.update), value)
        elif isinstance(value, (tuple, frozenset)):
            self._waiting.extend((v, name) for v in value if type(v) not in self._atoms)
        elif isinstance(value, MethodType):
            self._waiting.extend([(value.__self__, name), (value.__func__, name)])
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches.append((value, value.cache_info(), keys_of_cache(value)))
            self._waiting.extend((held, name) for held in (value.__wrapped__, *objects_of_cache(value)))
        elif isinstance(value, functools.partial):
            self._waiting.extend([(value.func, name), (value.args, name), (value.keywords, name)])
        elif isinstance(value, type):
            self._of_class(value)
        elif is_array(value):
            if value.nbytes <= _LARGE and value.flags.writeable:
                self.holders.append(of_array(value, name))
        else:
            self._of_object(value)
        if isinstance(value, _MAY_HAVE_OWN) and (own := attribute_dict(value)) is not None:
            self._of_attributes(value, own, type(value).__name__)

    def _wait(self, held: dict[Any, Any]) -> None:
        found = ((k, v) for k, v in list(held.items()) if type(v) not in self._atoms)
        self._waiting.extend((v, k if isinstance(k, str) else str(k)) for k, v in found)

    def _holds(self, holder: Holder, values: Iterable[Any]) -> None:
        self.holders.append(holder)
        self._waiting.extend((v, holder.name) for v in values if type(v) not in self._atoms)

    def _of_attributes(self, value: Any, own: dict[str, Any], label: str, skip: frozenset[str] = frozenset()) -> None:
        self.holders.append(of_attributes(value, own, label, skip))
        self._wait(self.holders[-1].before)
        if is_theirs(origin_of_module(type(value).__module__)):
            self._waiting.append((type(value), ""))

    def _of_module(self, value: nn.Module) -> None:
        label = type(value).__name__
        held = vars(value)
        if "_modules" not in held:  # a step that was copied with its model has them as soon as they are asked for
            held = {"_modules": value._modules, "_parameters": value._parameters}
        self.modules.append((value, dict(held["_parameters"]), dict(held["_modules"])))
        self._of_attributes(value, value.__dict__, label, skip=_TORCHS_OWN)
        self.holders += [of_dict(value._buffers, label, label), of_hooks(value)]
        for group in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
            self._wait(value.__dict__.get(group, {}))

    def _of_function(self, value: FunctionType) -> None:
        owner = origin_of_code(value.__code__, value.__globals__)
        if not is_theirs(owner):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self.holders.append(of_cell(cell, name))
            self._waiting.append((contents(cell), name))
        self._waiting.extend((v, value.__name__) for v in (value.__defaults__, value.__kwdefaults__))
        self._of_attributes(value, value.__dict__, value.__name__)
        if owner is Origin.USER:
            self._of_globals(value)

    def _of_globals(self, value: FunctionType) -> None:
        """What a function's code names: of its globals, and of the user's modules, which it may import as it runs."""
        known = value.__globals__
        named = {name for code in nested(value.__code__) for name in code.co_names}
        texts = {text for code in nested(value.__code__) for text in code.co_consts if isinstance(text, str)}
        found = {name: known[name] for name in sorted((named | texts) & known.keys())}
        self.holders.append(of_dict(known, "global", "global", sorted(found)))
        self._wait(found)
        imported = [m for name in named | texts if (m := _module(name, known.get("__package__"))) is not None]
        for module in (*imported, *(v for v in found.values() if isinstance(v, ModuleType))):
            if origin_of(module) is Origin.USER:
                self._waiting.append((module, module.__name__))
                self._wait({name: vars(module)[name] for name in sorted(named & vars(module).keys())})

    def _of_class(self, value: type) -> None:
        if not is_theirs(origin_of_module(value.__module__)):
            return
        self.holders.append(of_class(value))
        for key, held in self.holders[-1].before.items():
            self._waiting.append((_function_of(held), key))
        self._waiting.extend((base, "") for base in value.__mro__[1:])

    def _of_object(self, value: Any) -> None:
        kind = type(value)
        owner = origin_of_module(kind.__module__)
        if kind.__module__.startswith("numpy.random") and (hasattr(value, "bit_generator") or hasattr(value, "randn")):
            self.generators.append((value, drawn(value)))
            return
        if isinstance(value, ModuleType):
            if origin_of(value) is Origin.USER:
                self.holders.append(of_module(value))
                self._waiting.extend((v, k) for k, v in vars(value).items() if isinstance(v, _PLAIN_HOLDERS))
            return
        if owner is Origin.COMPILER or (owner is Origin.STANDARD and kind.__module__ not in _LOOKED_INTO):
            return
        if (own := attribute_dict(value)) is not None:
            self._of_attributes(value, own, kind.__name__)
        if is_theirs(owner) and any(slots_of(kind)):
            self.holders.append(of_slots(value, kind.__name__))
            self._wait(self.holders[-1].before)


def _of_a_capture(made: Any) -> bool:
    """Whether it is a parameter or module that holds tensors of a capture."""
    tensors: Iterable[Any] = [made]
    if isinstance(made, nn.Module):
        tensors = [*made.parameters(), *made.buffers(), *Reached([made], with_tensors=True).tensors]
    return any(isinstance(t, FakeTensor) for t in tensors)


def _has_tensors(member: Any) -> bool:
    """Whether it is a parameter, or a module with parameters or buffers."""
    if not isinstance(member, nn.Module):
        return isinstance(member, torch.Tensor)
    return next(member.parameters(), None) is not None or next(member.buffers(), None) is not None


def _function_of(held: Any) -> Any:
    """What a class runs for an attribute; attributes of other objects are not asked for: that may run their code."""
    if isinstance(held, (staticmethod, classmethod, MethodType)):
        return held.__func__
    if isinstance(held, functools.cached_property):
        return held.func
    return held.fget if isinstance(held, property) else held


def _module(name: str, package: str | None) -> ModuleType | None:
    """The module that code means by a name, if somebody has imported it."""
    found = sys.modules.get(name) or (sys.modules.get(f"{package}.{name}") if package else None)
    return found if isinstance(found, ModuleType) else None


def drawn(generator: Any) -> str:
    """The state of one of numpy's generators."""
    return repr(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())
