"""Every way to contract a network: binary trees over its leaves, a method at each node.

Networks are small, so all of it is searched, but for squares of large ones.  Unlike general einsum planners, equal
sub-networks are one node (Σ (x·ȳ)² computes x·ȳ once), and sizes may be sympy expressions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import sympy

from psg_fx.algebra.network import BATCH, ROWS, Axes, Members, Network, OneHot, has_primed
from psg_fx.planner.expr import ContractExpr, DenseExpr, Expr, LeafExpr, SumExpr, dense, numbered
from psg_fx.planner.methods import METHODS, Method, Pair
from psg_fx.tensors import Size

Concrete = Callable[[sympy.Expr], int]
"""Turns a size expression into an int, at one batch size."""


_CHEAPEST = 16
"""Ways to contract some of the leaves of a network that are kept: more only squares of three or four leaves have."""


def trees(
    network: Network, concrete: Concrete, methods: Sequence[Method] = METHODS,
    seconds: Callable[[Expr], float] | None = None,
) -> list[Expr]:  # fmt: skip
    """Every legal tree of the network; each leaves exactly the axes `network.out` (in the method's order).

    A leaf's lonely axes (its own, not kept) may be summed before anything else, which loses nothing.
    seconds: the time of a node; then of many ways to contract some of the leaves, only the cheapest are followed.
    """
    sizes: dict[str, Size] = {axis: concrete(size) for axis, size in network.sizes.items()}
    leaves = [LeafExpr(leaf.axes, sizes, leaf.dtype, leaf) for leaf in network.leaves]
    whole = frozenset(range(len(leaves)))
    memo: dict[frozenset[int], list[Expr]] = {}

    def needed(inside: frozenset[int]) -> set[str]:
        outside = {x for i in whole - inside for x in leaves[i].axes}
        return outside | set(network.out)

    def build(inside: frozenset[int]) -> list[Expr]:
        if inside in memo:
            return memo[inside]
        if len(inside) == 1:
            found = [_drop(leaves[next(iter(inside))], needed(inside), sizes)]
        else:
            kept, order, seen = needed(inside), network.order or network.out, set[object]()
            found = [
                expr
                for one, two in _halves(inside)
                for a, b in itertools.product(build(one), build(two))
                for expr in contractions(a, b, kept, sizes, order, methods, seen)
            ]
        unique = list({expr.key: expr for expr in found}.values())
        if seconds and inside != whole and len(unique) > _CHEAPEST:
            unique = sorted(unique, key=lambda expr: sum(map(seconds, expr.nodes.values())))[:_CHEAPEST]
        memo[inside] = unique
        return unique

    complete = [expr for expr in build(whole) if dense(expr).arg.dense]
    return complete + _summed_last(network, concrete, methods, seconds)


def _summed_last(
    network: Network, concrete: Concrete, methods: Sequence[Method], seconds: Callable[[Expr], float] | None
) -> list[Expr]:
    """Trees that form the gradient of every sample and sum the samples last: worth it where it is formed anyway.
    Products of gradients and weighted sums have such trees already.
    """
    is_product = has_primed(network.sizes)
    is_weighted = any(leaf.axes == (BATCH,) for leaf in network.leaves)
    if is_product or is_weighted or set(network.order) - set(network.out) != {BATCH}:
        return []
    formed = [dense(tree) for tree in trees(Network(network.leaves, network.order), concrete, methods, seconds)]
    return [SumExpr(tuple(x for x in e.axes if x != BATCH), e.sizes, e.dtype, e) for e in formed]


def _drop(expr: Expr, needed: set[str], sizes: dict[str, Size]) -> Expr:
    """Sum the axes of a single leaf that nothing else needs."""
    kept = tuple(x for x in expr.axes if x in needed)
    if len(kept) == len(expr.axes):
        return expr
    return SumExpr(kept, sizes, expr.dtype, dense(expr))


def _halves(inside: frozenset[int]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    first, *rest = sorted(inside)
    for count in range(len(rest)):
        for chosen in itertools.combinations(rest, count):
            one = frozenset([first, *chosen])
            yield one, inside - one


def contractions(
    a: Expr, b: Expr, needed: set[str], sizes: dict[str, Size], order: Axes, methods: Sequence[Method],
    seen: set[object],
) -> Iterator[Expr]:  # fmt: skip
    """Contract two nodes by every method that applies, implicit operands as they are or built.

    order: that of the result's axes, which methods keep where they can, so that nothing is transposed.  seen: what was
    contracted already of the same leaves, which the two halves of a square do alike.
    """
    if (b.rank, b.key) < (a.rank, a.key):
        a, b = b, a
    selected = False
    for x, y in itertools.product(_forms(a), _forms(b)):
        if selected and (_spreads(x, needed) or _spreads(y, needed)):
            continue
        kept = [axis for axis in dict.fromkeys(x.axes + y.axes) if axis in needed]
        first = {} if BATCH in kept else {ROWS: -1}  # rows of groups stand in the place of samples
        places = first | {axis: k for k, axis in enumerate(order)}
        out = tuple(sorted(kept, key=lambda axis: places.get(axis, len(order))))
        wanted = (x.key, y.key, numbered(x.axes, y.axes, out))
        if wanted in seen:
            continue
        seen.add(wanted)
        self_product = x.key == y.key
        pair = Pair(x.arg, y.arg, out, sizes, same=self_product and x.axes == y.axes, self_product=self_product)
        for method in methods:
            if method.applies(pair):
                selected = selected or isinstance(x.arg.form, OneHot) or isinstance(y.arg.form, OneHot)
                yield ContractExpr(method.out(pair), sizes, method.dtype(pair), x, y, method, pair)


def _spreads(expr: Expr, needed: set[str]) -> bool:
    """Whether a one-hot is built whose classes are kept: 0 times NaN, one class would have what another one has."""
    if not isinstance(expr, DenseExpr):
        return False
    form, axes = expr.child.arg.form, expr.child.axes
    return isinstance(form, OneHot) and axes[-1] in needed


def _forms(expr: Expr) -> tuple[Expr, ...]:
    built = dense(expr)
    if built is expr or isinstance(expr.arg.form, Members):  # 0 times NaN: a group would have what another one has
        return (expr,)
    return (expr, built)
