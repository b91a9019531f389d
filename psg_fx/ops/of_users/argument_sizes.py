"""Sizes among the arguments of a custom function, as in `apply(x, x.shape)`: read off the tensors of each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from psg_fx.graph import facts
from psg_fx.tensors import SYMBOLS, product

_READ = (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul)


@dataclass(frozen=True)
class _SizeOf:
    """A sum of products of sizes of tensors.  symbols: each with the tensor and the dim whose size it is."""

    size: sympy.Expr
    symbols: tuple[tuple[sympy.Symbol, int, int], ...]


@dataclass(frozen=True)
class _ShapeOf:
    """A `torch.Size` of such sizes, and of numbers."""

    sizes: tuple[Any, ...]


def without_symbols(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """An argument that is no tensor as it is kept: what is made of sizes of these tensors is known by them."""
    if isinstance(value, torch.Size):
        return _ShapeOf(tuple(without_symbols(size, tensors) for size in value))
    if not isinstance(value, torch.SymInt):
        return value
    size = facts.expr(value)
    places = {s: (s, i, d) for i, t in enumerate(tensors) for d, s in enumerate(facts.shape(t)) if s.is_Symbol}
    if not all(isinstance(part, _READ) for part in sympy.preorder_traversal(size)) or size.free_symbols - set(places):
        return value
    return _SizeOf(size, tuple(places[symbol] for symbol in sorted(size.free_symbols, key=str)))


def has_symbols(kept: Any) -> bool:
    """Whether something is left in it that is made of sizes, in a way that is not known."""
    return any(isinstance(v, SYMBOLS) for v in (kept.sizes if isinstance(kept, _ShapeOf) else (kept,)))


def of_call(kept: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The argument in a call with these tensors."""
    if isinstance(kept, _ShapeOf):
        return torch.Size([of_call(size, tensors) for size in kept.sizes])
    if not isinstance(kept, _SizeOf):
        return kept
    return _value(kept.size, {symbol: tensors[i].shape[dim] for symbol, i, dim in kept.symbols})


def _value(size: sympy.Expr, symbols: Mapping[sympy.Symbol, Any]) -> Any:
    if size.is_Symbol:
        return symbols[size]
    if size.is_Integer:
        return int(size)
    parts = [_value(part, symbols) for part in size.args]
    return sum(parts) if size.is_Add else product(parts)
