"""Which uses of a parameter meet in its elements: whether products of their gradients are those of the parameter's."""

from __future__ import annotations

import itertools

import sympy
import torch

from psg_fx.algebra.gradient import Term
from psg_fx.tensors import product


def why_not_direct(terms: tuple[Term, ...]) -> str:
    """Why products of the terms are not those of the parameter's gradient, or ""."""
    for term in terms:
        if not term.prefix.selects:
            made_by = "·".join(term.prefix.ops) or "its use"
            return f"{made_by} before the site is not a selection: gradients are pulled back first"
    for first, term in itertools.combinations(terms, 2):
        if term.prefix.operand != first.prefix.operand and not _same_selection(term, first):
            if disjoint(term, first):
                continue
            return "its uses select different elements: gradients are pulled back first"
        if _out_sizes(term) != _out_sizes(first):
            return "its uses see it in different shapes: gradients are summed first"
    return ""


def overlap(one: Term, two: Term) -> bool:
    """Whether two terms meet in any element of the parameter."""
    if one is two or one.prefix.operand == two.prefix.operand or _same_selection(one, two):
        return True
    return not disjoint(one, two)


def disjoint(one: Term, two: Term) -> bool:
    """Whether the two terms select different elements of the parameter: their inner product is zero."""
    a, b = _selected(one), _selected(two)
    return a is not None and b is not None and not bool(torch.isin(a, b).any())


def _same_selection(one: Term, two: Term) -> bool:
    return one.prefix.trivial and two.prefix.trivial


def _selected(term: Term) -> torch.Tensor | None:
    """Which elements of the parameter the prefix selects, found by running it on their indices."""
    prefix = term.prefix
    if prefix.trivial or prefix.graph is None or not prefix.selects:
        return None
    (node,) = [n for n in prefix.graph.graph.nodes if n.op == "placeholder"]
    shape = tuple(int(s) for s in node.meta["val"].shape)
    index = torch.arange(product(shape), dtype=torch.float64).reshape(shape)
    if prefix.casts:
        return None
    selected: torch.Tensor = prefix.graph(index).flatten()
    return selected


def _out_sizes(term: Term) -> tuple[sympy.Expr, ...]:
    sizes = term.network.sizes
    return tuple(sizes[a] for a in term.network.out)
