"""What holds values and can be reached from a model and its loss: what it held, and how to put that back."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from psg_fx.program.code import Origin, is_theirs, nested, origin_of, origin_of_code, origin_of_module
from psg_fx.program.objects import (
    MISSING,
    attribute_dict,
    contents,
    is_array,
    keep_in_cache,
    keys_of_cache,
    objects_of_cache,
    slot,
    slots_of,
)

_MOST = 500_000
_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of every module, which torch.export changes itself and puts back."""
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
REGISTER = "register_forward_hook"
_MAY_HAVE_OWN = (list, dict, set, tuple, frozenset, collections.deque, functools.partial)
"""What has attributes where its class is the user's, or always."""
_LARGE = 1 << 24
"""Bytes of an array that are not copied to see whether the code writes to it."""
_NUMBERS = (bool, int, float, str, bytes, type(None))
_ATOMS = (*_NUMBERS, torch.Tensor, nn.Parameter)
_PLAIN_HOLDERS = (list, dict, set, FunctionType)
_LOOKED_INTO = ("types", "argparse", "collections", "dataclasses", "enum", "configparser", "string")


class Hooks:
    """The kind of holders that have the hooks of a module."""


@dataclass(frozen=True)
class Holder:
    """Something that holds values by keys, or in an order, and what it held.

    keyed: whether single keys can be written.  label, name: for messages.  owner: the module whose attributes they are.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    put: Callable[[Any, Any], None]
    before: Any
    label: str
    name: str
    keyed: bool = True
    owner: nn.Module | None = None
    kind: type = object
    """The class of the object whose attributes they are, which has others."""


class Reached:
    """All that code can reach from the roots, as it is before the code runs.

    generators: those of numpy's, and their states.  caches: of functions (`functools.lru_cache`), and how often they
    were asked, and for what.  tensors: where they are looked for.
    """

    def __init__(self, roots: Sequence[Any], with_tensors: bool = False) -> None:
        self._atoms = _NUMBERS if with_tensors else _ATOMS
        self.tensors: list[torch.Tensor] = []
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
        return [(h, now) for h, now in found if not _same(h.before, now)]

    def put_back(self) -> list[tuple[Holder, Any]]:
        """All is as it was, what caches held, too.  Returns `changes()`."""
        changes = self.changes()
        for holder, _ in changes:
            holder.write(holder.before)
        for cache, info, keys in self.caches:
            if cache.cache_info().misses != info.misses:
                keep_in_cache(cache, keys)
        return changes

    def _look(self, value: Any, name: str) -> None:
        if isinstance(value, nn.Module):
            self._attributes(value, value.__dict__, type(value).__name__, skip=_TORCHS_OWN)
            self._keyed(value._buffers, type(value).__name__, type(value).__name__)
            self._hooks(value)
            for group in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
                self._wait(value.__dict__.get(group, {}))
        elif isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.UntypedStorage):
            return
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, (list, collections.deque)):
            self._items(value, name, value.extend)
        elif isinstance(value, dict):
            self._keyed(value, name, name)
            self._wait(value)
        elif isinstance(value, set):
            self._items(value, name, value.update)
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
            self._class(value)
        elif is_array(value):
            self._array(value, name)
        else:
            self._thing(value)
        if isinstance(value, _MAY_HAVE_OWN) and (own := attribute_dict(value)) is not None:
            self._attributes(value, own, type(value).__name__)

    def _wait(self, held: dict[Any, Any]) -> None:
        found = ((k, v) for k, v in list(held.items()) if type(v) not in self._atoms)
        self._waiting.extend((v, k if isinstance(k, str) else str(k)) for k, v in found)

    def _keyed(self, held: dict[Any, Any], label: str, name: str, only: Sequence[str] | None = None) -> None:
        """A dict, or some keys of it."""

        def read() -> dict[Any, Any]:
            return dict(held) if only is None else {k: held[k] for k in only if k in held}

        def write(before: dict[Any, Any]) -> None:
            if only is None:
                held.clear()
            held.update(before)

        self.holders.append(Holder(read, write, held.__setitem__, read(), label, name))

    def _hooks(self, value: nn.Module) -> None:
        """Those of a module, by their kind and number."""
        groups = [value.__dict__.get(name, {}) for name in _HOOKS]

        def read() -> dict[Any, Any]:
            return {(k, number): hook for k, held in enumerate(groups) if held for number, hook in held.items()}

        def write(before: dict[Any, Any]) -> None:
            for held in groups:
                held.clear()
            for key, hook in before.items():
                put(key, hook)

        def put(key: tuple[int, int], hook: Any) -> None:
            groups[key[0]][key[1]] = hook

        label = f"hooks of {type(value).__name__}"
        self.holders.append(Holder(read, write, put, read(), label, REGISTER, kind=Hooks))

    def _attributes(self, value: Any, own: dict[str, Any], label: str, skip: frozenset[str] = frozenset()) -> None:
        def read() -> dict[Any, Any]:
            return {k: v for k, v in own.items() if k not in skip}

        def write(before: dict[Any, Any]) -> None:
            for key in set(own) - skip - set(before):
                del own[key]
            own.update(before)

        before = read()
        owner = value if isinstance(value, nn.Module) else None
        self.holders.append(Holder(read, write, own.__setitem__, before, label, label, owner=owner, kind=type(value)))
        self._wait(before)
        if is_theirs(origin_of_module(type(value).__module__)):
            self._waiting.append((type(value), ""))

    def _items(self, value: Any, name: str, refill: Callable[[Any], None]) -> None:
        """A list or a set."""

        def write(before: tuple[Any, ...]) -> None:
            value.clear()
            refill(before)

        self.holders.append(Holder(lambda: tuple(value), write, _unwritten, tuple(value), name, name, keyed=False))
        self._waiting.extend((v, name) for v in value if type(v) not in self._atoms)

    def _array(self, value: Any, name: str) -> None:
        """One of numpy's, by a copy; a large one is not copied."""
        if value.nbytes > _LARGE or not value.flags.writeable:
            return
        before = (value.copy(),)

        def read() -> tuple[Any, ...]:
            return before if value.tobytes() == before[0].tobytes() else (value.copy(),)

        def write(held: tuple[Any, ...]) -> None:
            value[...] = held[0]

        self.holders.append(Holder(read, write, _unwritten, before, name, name, keyed=False))

    def _slots(self, value: Any, label: str) -> None:
        """The attributes of an object that has no dict for them."""
        names = [*slots_of(type(value))]

        def read() -> dict[Any, Any]:
            return {k: held for k in names if (held := slot(value, k)) is not MISSING}

        def write(before: dict[Any, Any]) -> None:
            for key in set(read()) - set(before):
                delattr(value, key)
            for key, held in before.items():
                setattr(value, key, held)

        self.holders.append(Holder(read, write, functools.partial(setattr, value), read(), label, label))
        self._wait(read())

    def _function(self, value: FunctionType) -> None:
        owner = origin_of_code(value.__code__, value.__globals__)
        if not is_theirs(owner):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self._cell(cell, name)
        self._waiting.extend((v, value.__name__) for v in (value.__defaults__, value.__kwdefaults__))
        self._attributes(value, value.__dict__, value.__name__)
        if owner is Origin.USER:
            known = value.__globals__
            names = {name for code in nested(value.__code__) for name in code.co_names if name in known}
            self._keyed(known, "global", "global", sorted(names))
            self._wait({name: known[name] for name in names})

    def _cell(self, cell: types.CellType, name: str) -> None:
        def write(before: dict[Any, Any]) -> None:
            if before[name] is not MISSING:
                cell.cell_contents = before[name]

        def read() -> dict[Any, Any]:
            return {name: contents(cell)}

        def put(_: Any, new: Any) -> None:
            cell.cell_contents = new

        self.holders.append(Holder(read, write, put, read(), "closure", name))
        self._waiting.append((contents(cell), name))

    def _module(self, value: ModuleType) -> None:
        """The names of a module of the user's, but of modules in it, which importing adds."""
        own = vars(value)

        def read() -> dict[Any, Any]:
            return {k: v for k, v in own.items() if not k.startswith("__") and not isinstance(v, ModuleType)}

        def write(before: dict[Any, Any]) -> None:
            for key in set(read()) - set(before):
                del own[key]
            own.update(before)

        self.holders.append(Holder(read, write, own.__setitem__, read(), value.__name__, value.__name__))
        self._waiting.extend((v, k) for k, v in own.items() if isinstance(v, _PLAIN_HOLDERS))

    def _class(self, value: type) -> None:
        if not is_theirs(origin_of_module(value.__module__)):
            return

        def read() -> dict[Any, Any]:
            return {k: v for k, v in value.__dict__.items() if not k.startswith("__")}

        def write(before: dict[Any, Any]) -> None:
            for key in set(read()) - set(before):
                delattr(value, key)
            for key, held in before.items():
                if value.__dict__.get(key) is not held:
                    setattr(value, key, held)

        self.holders.append(
            Holder(read, write, functools.partial(setattr, value), read(), value.__name__, value.__name__)
        )
        for key, held in read().items():
            function = getattr(held, "__func__", getattr(held, "fget", held))
            self._waiting.append((function, key))
        self._waiting.extend((base, "") for base in value.__mro__[1:])

    def _thing(self, value: Any) -> None:
        kind = type(value)
        owner = origin_of_module(kind.__module__)
        if kind.__module__.startswith("numpy.random") and (hasattr(value, "bit_generator") or hasattr(value, "randn")):
            self.generators.append((value, drawn(value)))
            return
        if isinstance(value, ModuleType):
            if origin_of(value) is Origin.USER:
                self._module(value)
            return
        if owner is Origin.COMPILER or (owner is Origin.STANDARD and kind.__module__ not in _LOOKED_INTO):
            return
        if (own := attribute_dict(value)) is not None:
            self._attributes(value, own, kind.__name__)
        if is_theirs(owner) and any(slots_of(kind)):
            self._slots(value, kind.__name__)


def drawn(generator: Any) -> str:
    """The state of one of numpy's generators."""
    return repr(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def _unwritten(key: Any, value: Any) -> None:
    raise AssertionError("lists and sets are not written by key")


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(operator.is_, before, now))
    return len(before) == len(now) and all(k in now and now[k] is v for k, v in before.items())
