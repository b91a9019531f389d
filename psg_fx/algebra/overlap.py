"""Which uses of a parameter meet in its elements: whether products of their gradients are those of the parameter's."""

from __future__ import annotations

import itertools
import math
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch

from psg_fx.algebra.gradient import Term


def why_not_direct(terms: tuple[Term, ...]) -> str:
    """Why products of the terms are not those of the parameter's gradient, or ""."""
    for term in terms:
        if not term.prefix.selects:
            made_by = "·".join(term.prefix.ops) or "its use"
            return f"{made_by} before the site is not a selection: gradients are pulled back first"
    for first, term in itertools.combinations(terms, 2):
        if not overlap(first, term):
            continue
        if not _same_selection(first, term):
            return "its uses select different elements: gradients are pulled back first"
        if _out_sizes(term) != _out_sizes(first):
            return "its uses see it in different shapes: gradients are summed first"
    return ""


def overlap(one: Term, two: Term) -> bool:
    """Whether two terms meet in any element of the parameter."""
    return _same_selection(one, two) or not _disjoint(one, two)


def _disjoint(one: Term, two: Term) -> bool:
    """Whether the two terms select different elements of the parameter: their inner product is zero."""
    if not (_is_selection(one) and _is_selection(two)):
        return False
    a, b = one.prefix.graph, two.prefix.graph
    known = _DISJOINT.setdefault(a, WeakKeyDictionary())
    if b not in known:
        taken = torch.zeros(_elements(one), dtype=torch.bool)
        taken[_selected(one)] = True
        known[b] = not bool(taken[_selected(two)].any())
        _DISJOINT.setdefault(b, WeakKeyDictionary())[a] = known[b]
    return known[b]


_DISJOINT: WeakKeyDictionary[Any, WeakKeyDictionary[Any, bool]] = WeakKeyDictionary()
"""By the graphs of two prefixes; indices of a large parameter take long to compare, and every quantity asks."""


def _same_selection(one: Term, two: Term) -> bool:
    """Whether both are uses of one operand, or of the parameter itself."""
    return one.prefix.operand == two.prefix.operand or (one.prefix.trivial and two.prefix.trivial)


def _is_selection(term: Term) -> bool:
    prefix = term.prefix
    return not prefix.trivial and prefix.graph is not None and prefix.selects and not prefix.casts


def _selected(term: Term) -> torch.Tensor:
    """Which elements of the parameter the prefix selects, found by running it on their indices."""
    graph = term.prefix.graph
    assert graph is not None
    count = _elements(term)
    index = torch.arange(count, dtype=torch.int32 if count < 1 << 31 else torch.int64)
    selected: torch.Tensor = graph(index.reshape(_shape(term)))
    return selected.flatten().long()


def _elements(term: Term) -> int:
    return math.prod(_shape(term))


def _shape(term: Term) -> tuple[int, ...]:
    """That of the parameter."""
    graph = term.prefix.graph
    assert graph is not None
    (node,) = [n for n in graph.graph.nodes if n.op == "placeholder"]
    return tuple(int(s) for s in node.meta["val"].shape)


def _out_sizes(term: Term) -> tuple[sympy.Expr, ...]:
    sizes = term.network.sizes
    return tuple(sizes[a] for a in term.network.out)
