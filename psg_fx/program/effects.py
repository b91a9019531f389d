"""What captured code changes in the Python around it: put back, and written anew after every step, or refused.

An ordinary forward that keeps a tensor or a number in an attribute (`self.last = h.detach()`) does so at every call.
The capture runs it once, on fake values.  So everything that can be reached from the model and the loss is looked at
before and after: what has changed is put back, tensors that were stored become results of the graph, and every step
stores them as the forward would.  A change that cannot be told so, such as a list that grows, is refused.
"""

from __future__ import annotations

import collections
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.graph.facts import Entry, at, expr
from psg_fx.program.code import Origin, is_theirs, line_naming, names_of, nested, origin, origin_of_module
from psg_fx.program.observe import Observed, changing
from psg_fx.program.walk import MISSING, contents

_MOST = 500_000
_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of every module, which torch.export changes itself and puts back."""


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


@dataclass(frozen=True)
class Written:
    """What every step leaves in the Python around it: `put(key, value)`.

    leaves: its parts, numbers as they are or by the batch size; a mark where the next result of the graph goes.
    """

    put: Callable[[Any, Any], None]
    key: Any
    label: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[None, ...]:
        """One entry for each result of the graph that it takes."""
        return tuple(None for leaf in self.leaves if leaf is _RESULT)

    def store(self, results: Iterator[torch.Tensor], batch: sympy.Symbol, size: int) -> None:
        """Leave it there after one step."""
        found = [next(results).detach() if leaf is _RESULT else _number(leaf, batch, size) for leaf in self.leaves]
        self.put(self.key, pytree.tree_unflatten(found, self.spec))


WRITTEN = Entry[tuple[Written, ...]]("values written to attributes")
"""What the program leaves in the Python around it, in the order of the outputs (set by capture)."""


_RESULT = object()


class Effects:
    """Everything that the code can reach, as it is before it runs."""

    def __init__(self, roots: Sequence[Any], hidden: Sequence[Any] = ()) -> None:
        self.holders: list[Holder] = []
        self._seen = {id(h) for h in hidden}
        self._alive: list[Any] = []
        self._waiting: collections.deque[tuple[Any, str]] = collections.deque((r, type(r).__name__) for r in roots)
        self._draws = _numpy_state()
        self._generators: list[tuple[Any, str]] = []
        while self._waiting and len(self._alive) < _MOST:
            value, name = self._waiting.popleft()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._alive.append(value)
                self._look(value, name)

    def settle(self, observed: Observed) -> tuple[list[Written], list[torch.Tensor]]:
        """Put everything back.  Returns what every step must write, and the tensors of the capture among it.

        Raises:
            NotYetSupported: a change that a step cannot repeat.
        """
        changes = self.undo(observed)
        if not _equal(self._draws, _numpy_state()) or any(_drawn(g) != state for g, state in self._generators):
            raise changing("a random number of numpy's", "the model or the loss")
        written, tensors = [], []
        for holder, now in changes:
            if not holder.keyed:
                raise _refusal(holder.label, holder.name, observed)
            for key in dict.fromkeys((*holder.before, *now)):
                old, new = holder.before.get(key, MISSING), now.get(key, MISSING)
                if old is new:
                    continue
                if _kept_by_torch(holder, key, observed):
                    observed.forget(holder.owner, key)
                else:
                    entry, found = self._repeated(holder, key, new, observed)
                    written.append(entry)
                    tensors += found
        return written, tensors

    def undo(self, observed: Observed) -> list[tuple[Holder, dict[Any, Any]]]:
        """Put everything back.  Returns what had changed, and what it held."""
        changes = [(h, h.read()) for h in self.holders]
        changes = [(h, now) for h, now in changes if not _same(h.before, now)]
        for holder, _ in changes:
            holder.write(holder.before)
        forget_caches(observed)
        return changes

    def _repeated(self, holder: Holder, key: Any, new: Any, observed: Observed) -> tuple[Written, list[torch.Tensor]]:
        """What every step has to write, and the tensors among it."""
        label = f"{holder.label}.{key}" if isinstance(key, str) else f"{holder.label}[{key!r}]"
        leaves, spec = pytree.tree_flatten(new)
        counts = _counts(holder.before.get(key), new) and observed.may_read(holder.owner, key)
        if counts or new is MISSING or not all(isinstance(v, _REPEATED) for v in leaves):
            raise _refusal(label, key if isinstance(key, str) else holder.name, observed, counts)
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        parts = tuple(_RESULT if isinstance(v, torch.Tensor) else _expression(v) for v in leaves)
        return Written(holder.put, key, label, spec, parts), tensors

    # -- what there is ------------------------------------------------------------------------------------------------

    def _look(self, value: Any, name: str) -> None:
        if isinstance(value, nn.Module):
            self._attributes(value, value.__dict__, type(value).__name__, skip=_TORCHS_OWN)
            for group in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
                self._wait(value.__dict__.get(group, {}))
        elif isinstance(value, (torch.Tensor, torch.UntypedStorage)):
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
            self._waiting.extend((v, name) for v in value if type(v) not in _ATOMS)
        elif isinstance(value, MethodType):
            self._waiting.extend([(value.__self__, name), (value.__func__, name)])
        elif isinstance(value, functools.partial):
            self._waiting.extend([(value.func, name), (value.args, name), (value.keywords, name)])
        elif isinstance(value, type):
            self._class(value)
        else:
            self._thing(value, name)

    def _wait(self, held: dict[Any, Any]) -> None:
        found = ((k, v) for k, v in list(held.items()) if type(v) not in _ATOMS)
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

    def _attributes(self, value: Any, own: dict[str, Any], label: str, skip: frozenset[str] = frozenset()) -> None:
        def read() -> dict[Any, Any]:
            return {k: v for k, v in own.items() if k not in skip}

        def write(before: dict[Any, Any]) -> None:
            for key in set(own) - skip - set(before):
                del own[key]
            own.update(before)

        before = read()
        owner = value if isinstance(value, nn.Module) else None
        self.holders.append(Holder(read, write, own.__setitem__, before, label, label, owner=owner))
        self._wait(before)
        if is_theirs(origin_of_module(type(value).__module__)):
            self._waiting.append((type(value), ""))

    def _items(self, value: Any, name: str, refill: Callable[[Any], None]) -> None:
        """A list or a set."""

        def write(before: tuple[Any, ...]) -> None:
            value.clear()
            refill(before)

        self.holders.append(Holder(lambda: tuple(value), write, _unwritten, tuple(value), name, name, keyed=False))
        self._waiting.extend((v, name) for v in value if type(v) not in _ATOMS)

    def _function(self, value: FunctionType) -> None:
        owner = origin(value.__code__.co_filename)
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

    def _thing(self, value: Any, name: str) -> None:
        kind = type(value)
        owner = origin_of_module(kind.__module__)
        if kind.__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
            self._generators.append((value, _drawn(value)))
            return
        if isinstance(value, ModuleType):
            if origin_of_module(value.__name__) is Origin.USER:
                self._waiting.extend((v, k) for k, v in vars(value).items() if isinstance(v, (*_PLAIN_HOLDERS,)))
            return
        if owner is Origin.COMPILER or (owner is Origin.STANDARD and kind.__module__ not in _LOOKED_INTO):
            return
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            own = None
        if isinstance(own, dict):
            self._attributes(value, own, kind.__name__)


_ATOMS = (bool, int, float, str, bytes, type(None), torch.Tensor, nn.Parameter)
_PLAIN_HOLDERS = (list, dict, set, FunctionType)
_LOOKED_INTO = ("types", "argparse", "collections", "dataclasses", "enum", "configparser", "string")
_REPEATED = (torch.Tensor, bool, int, float, str, bytes, type(None), torch.SymInt, torch.dtype, torch.device,
             torch.Size)  # fmt: skip


def _refusal(label: str, name: str, observed: Observed, counts: bool = False) -> NotYetSupported:
    return NotYetSupported(
        f"the code changes {label}", where=line_naming(iter(observed.code), name) or label,
        why="it reads the number that it changes, so every call would need another graph" if counts
        else "a graph runs no Python, so this would happen once, while the model is captured",
        fix="make it a buffer (torch.zeros(()), then add_), which every step writes" if counts
        else "return the value from the model, keep it in an attribute as a tensor, or leave the line out",
    )  # fmt: skip


def _kept_by_torch(holder: Holder, key: Any, observed: Observed) -> bool:
    """Whether a layer of torch's writes an attribute for itself, as recurrent layers list their weights.

    Such a layer looks whether its list still holds, so it is neither an effect nor a value that is read.
    """
    if holder.owner is None or not any(k.__module__.startswith("torch.nn") for k in type(holder.owner).__mro__[:-2]):
        return False
    return not any(key in names_of(code).attributes for code in observed.code)


def _counts(old: Any, new: Any) -> bool:
    """Whether a number becomes another one."""
    return type(old) in (int, float) and type(new) in (int, float)


def _unwritten(key: Any, value: Any) -> None:
    raise AssertionError("lists and sets are not written by key")


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(operator.is_, before, now))
    return len(before) == len(now) and all(k in now and now[k] is v for k, v in before.items())


def _expression(value: Any) -> Any:
    return expr(value) if isinstance(value, torch.SymInt) else value


def _number(leaf: Any, batch: sympy.Symbol, size: int) -> Any:
    return at(leaf, batch, size) if isinstance(leaf, sympy.Expr) else leaf


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


def _drawn(generator: Any) -> str:
    """The state of one of numpy's generators."""
    return repr(generator.bit_generator.state)


def _equal(before: Any, now: Any) -> bool:
    return before is None or now is None or (before[2:] == now[2:] and bool((before[1] == now[1]).all()))


def forget_caches(observed: Observed) -> None:
    """Empty the caches (`functools.lru_cache`) of functions that ran: what they hold now is of the capture."""
    for code in observed.code:
        found = observed.named(code)
        if isinstance(found, functools._lru_cache_wrapper):
            found.cache_clear()
