"""Values that code leaves in the Python around it, in attributes and containers: every step writes them anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from psg_fx.graph.facts import Entry, expr
from psg_fx.program.arguments.packed import is_packed
from psg_fx.program.changes.counters import Counted, is_counter
from psg_fx.program.changes.holders import Holder
from psg_fx.program.changes.reached import NUMBERS
from psg_fx.program.objects import MISSING
from psg_fx.torch_private.symbols import depends_on_values

_RESULT, _WITH_GRADIENT = object(), object()
"""Marks of the next result of the graph, a constant or one whose gradient an ordinary forward would keep with it."""
_COMPUTED = "_psg_fx_computed"
_REPEATED = (*NUMBERS, torch.Tensor, torch.SymInt, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Written:
    """What every step leaves in the Python around it: `put(key, value)`.

    leaves: its parts, numbers as they are or by the sizes of the call; marks where the next results of the graph go.
    container: the list or dict that it is written into, if it is one.  owner: the module whose attribute it is.
    """

    put: Callable[[Any, Any], None]
    key: Any
    label: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    container: Any = None
    owner: nn.Module | None = None

    @property
    def tensors(self) -> int:
        """How many results of the graph it takes."""
        return sum(leaf is _RESULT or leaf is _WITH_GRADIENT for leaf in self.leaves)

    def store(self, results: Iterator[torch.Tensor], sizes: Mapping[sympy.Symbol, int]) -> None:
        """Leave it there after one step.  sizes: how many samples the call has, and rows of each axis."""
        found = [int(leaf.subs(sizes)) if isinstance(leaf, sympy.Expr) else leaf for leaf in self.leaves]
        for k, leaf in enumerate(self.leaves):
            if isinstance(leaf, Counted):
                found[k] = leaf.after(vars(self.owner)[self.key], sizes)
            if leaf is _RESULT or leaf is _WITH_GRADIENT:
                found[k] = next(results).detach()
            if leaf is _WITH_GRADIENT:
                setattr(found[k], _COMPUTED, self.label)
        self.put(self.key, pytree.tree_unflatten(found, self.spec))

    def of_graph(self, known: Callable[[sympy.Expr], sympy.Expr]) -> Written:
        """The same, by the sizes of a graph.  known: says sizes of the code's run by those."""
        leaves = (v.of_graph(known) if isinstance(v, Counted) else v for v in self.leaves)
        return replace(self, leaves=tuple(known(v) if isinstance(v, sympy.Expr) else v for v in leaves))

    def into(self, container: Any) -> Written:
        """The same, where another list or dict has come in the place of that one."""
        return replace(self, put=container.__setitem__, container=container)


def computed_before(value: torch.Tensor) -> str:
    """Where a step has stored a tensor whose way from the parameters is lost; "" for any other tensor."""
    found: str = getattr(value, _COMPUTED, "")
    return found


WRITTEN = Entry[tuple[Written, ...]]("values written to attributes")
"""What the program leaves in the Python around it, in the order of the outputs (set by capture)."""


def written_anew(holder: Holder, key: Any, label: str, value: Any) -> Written | None:
    """What every step has to write where code has left such a value; None if no step can make one."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=is_packed)
    if is_counter(value) and value.counts(holder.owner, key):
        return Written(holder.put, key, label, spec, (value.counted,), owner=holder.owner)
    if value is MISSING or not all(_is_repeated(v) or _holds_nothing(v) for v in leaves):
        return None
    return Written(holder.put, key, label, spec, tuple(map(_part, leaves)), holder.container)


def leave_the_same(one: Sequence[Written], other: Sequence[Written]) -> bool:
    """Whether two runs have left the same values, but for numbers that one of them has counted on with."""
    if [entry.label for entry in one] != [entry.label for entry in other]:
        return False
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if not any(isinstance(v, Counted) for v in b.leaves)]
    return all(a.spec == b.spec and list(map(str, a.leaves)) == list(map(str, b.leaves)) for a, b in pairs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Those that are results of the graph, in their order."""
    return [v for v in pytree.tree_leaves(value, is_leaf=is_packed) if isinstance(v, torch.Tensor)]


def _is_repeated(value: Any) -> bool:
    """Whether every step can write such a value; a number that was read out of a tensor is another one each time."""
    return isinstance(value, _REPEATED) and not is_counter(value) and not depends_on_values(value)


def _holds_nothing(value: Any) -> bool:
    """Whether it is a module of Python, or a function that is the same whenever it is made: libraries keep what they
    have looked up.
    """
    if isinstance(value, ModuleType):
        return True
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, (ModuleType, type(None)))
    if not isinstance(value, FunctionType) or value.__closure__ or vars(value):
        return False
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return all(isinstance(v, NUMBERS) for v in defaults)


def _part(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _WITH_GRADIENT if leaf.requires_grad else _RESULT
    return _expression(leaf)


def _expression(value: Any) -> Any:
    return expr(value) if isinstance(value, torch.SymInt) else value
