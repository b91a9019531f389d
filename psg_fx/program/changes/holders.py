"""What holds values in Python: what it held, and how to put that back, or write one of them."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from psg_fx.program.objects import MISSING, class_of_storage, contents, slot, slots_of

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
REGISTER = "register_forward_hook"


class Hooks:
    """The kind of holders that have the hooks of a module."""


@dataclass(frozen=True)
class Holder:
    """Something that holds values, and what it held.

    read: its values by keys, which can be written one by one; or, in a tuple, as a whole.  label, name: for messages.
    owner: the module whose attributes they are.  container: the list or dict that it is.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    put: Callable[[Any, Any], None]
    before: Any
    label: str
    name: str
    owner: nn.Module | None = None
    kind: type = object
    """The class of the object whose attributes they are, which has others."""
    container: Any = None

    def is_as_before(self, now: Any) -> bool:
        """Whether values that it has now, as `read` gives them, are those that it held."""
        if type(self.before) is not type(now) or len(self.before) != len(now):
            return False
        if isinstance(now, tuple):
            return all(map(operator.is_, self.before, now))
        return all(k in now and now[k] is v for k, v in self.before.items())


def of_dict(held: dict[Any, Any], label: str, name: str, only: Sequence[str] | None = None) -> Holder:
    """A dict, or some keys of it."""

    kind = class_of_storage(held)

    def read() -> dict[Any, Any]:
        every = dict(kind.items(held))
        return every if only is None else {k: every[k] for k in only if k in every}

    def write(before: dict[Any, Any]) -> None:
        if only is None:
            kind.clear(held)
        kind.update(held, before)

    return Holder(read, write, functools.partial(kind.__setitem__, held), read(), label, name, container=held)


def of_list(value: list[Any], name: str) -> Holder:
    """A list: while it is as long as before, its places are keys."""
    length = len(value)

    def read() -> Any:
        return dict(enumerate(value)) if len(value) == length else tuple(value)

    def write(held: Any) -> None:
        value[:] = held.values() if isinstance(held, dict) else held

    return Holder(read, write, value.__setitem__, read(), name, name, container=value)


def of_items(value: Any, name: str, refill: Callable[[Any], None]) -> Holder:
    """A set, or what has its values in an order."""

    def write(before: tuple[Any, ...]) -> None:
        value.clear()
        refill(before)

    return Holder(lambda: tuple(value), write, _unwritten, tuple(value), name, name)


def of_array(value: Any, name: str) -> Holder:
    """An array of numpy's, by a copy."""
    before = (value.copy(),)

    def read() -> tuple[Any, ...]:
        return before if value.tobytes() == before[0].tobytes() else (value.copy(),)

    def write(held: tuple[Any, ...]) -> None:
        value[...] = held[0]

    return Holder(read, write, _unwritten, before, name, name)


def of_hooks(value: nn.Module) -> Holder:
    """The hooks of a module, by their kind and number."""
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
    return Holder(read, write, put, read(), label, REGISTER, kind=Hooks)


def of_attributes(value: Any, own: dict[str, Any], label: str, skip: frozenset[str] = frozenset()) -> Holder:
    """The attributes of an object, which lie in `own`."""

    def read() -> dict[Any, Any]:
        return {k: v for k, v in own.items() if k not in skip}

    def write(before: dict[Any, Any]) -> None:
        for key in set(own) - skip - set(before):
            del own[key]
        own.update(before)

    owner = value if isinstance(value, nn.Module) else None
    return Holder(read, write, own.__setitem__, read(), label, label, owner=owner, kind=type(value))


def of_slots(value: Any, label: str) -> Holder:
    """The attributes of an object that has no dict for them."""
    names = [*slots_of(type(value))]

    def read() -> dict[Any, Any]:
        return {k: held for k in names if (held := slot(value, k)) is not MISSING}

    def write(before: dict[Any, Any]) -> None:
        for key in set(read()) - set(before):
            object.__delattr__(value, key)
        for key, held in before.items():
            object.__setattr__(value, key, held)  # a frozen dataclass refuses it by its own

    return Holder(read, write, functools.partial(object.__setattr__, value), read(), label, label)


def of_cell(cell: types.CellType, name: str) -> Holder:
    """A variable that functions share."""

    def write(before: dict[Any, Any]) -> None:
        if before[name] is not MISSING:
            cell.cell_contents = before[name]

    def read() -> dict[Any, Any]:
        return {name: contents(cell)}

    def put(_: Any, new: Any) -> None:
        cell.cell_contents = new

    return Holder(read, write, put, read(), "closure", name)


def of_module(value: ModuleType) -> Holder:
    """The names of a module of Python, but of modules in it, which importing adds."""
    own = vars(value)

    def read() -> dict[Any, Any]:
        return {k: v for k, v in own.items() if not k.startswith("__") and not isinstance(v, ModuleType)}

    def write(before: dict[Any, Any]) -> None:
        for key in set(read()) - set(before):
            del own[key]
        own.update(before)

    return Holder(read, write, own.__setitem__, read(), value.__name__, value.__name__)


def of_class(value: type) -> Holder:
    """The attributes of a class, but `__name__` and the like."""

    def read() -> dict[Any, Any]:
        return {k: v for k, v in value.__dict__.items() if not k.startswith("__")}

    def write(before: dict[Any, Any]) -> None:
        for key in set(read()) - set(before):
            delattr(value, key)
        for key, held in before.items():
            if value.__dict__.get(key) is not held:
                setattr(value, key, held)

    return Holder(read, write, functools.partial(setattr, value), read(), value.__name__, value.__name__)


def _unwritten(key: Any, value: Any) -> None:
    raise AssertionError("sets and arrays are not written by key")
