"""Every way to contract a network: binary trees over its leaves, a method at each node.

Networks are small (at most five or six leaves), so the search is exhaustive.  Unlike general einsum planners, equal
sub-networks are one node (Σ (x·ȳ)² computes x·ȳ once), and sizes may be sympy expressions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch

from psg_fx.algebra.network import BATCH, Axes, Dense, Kind, Leaf, Network, OneHot, Patches
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods import METHODS, Arg, Method, Pair
from psg_fx.tensors import Size, product

Concrete = Callable[[sympy.Expr], int]
"""Turns a size expression into an int, at one batch size."""

_IDS: dict[Any, int] = {}
_RANKS = {kind: rank for rank, kind in enumerate(Kind)}


def _intern(key: Any) -> int:
    """A small number that stands for a key, so that equal sub-networks compare fast."""
    return _IDS.setdefault(key, len(_IDS))


@dataclass(frozen=True, eq=False)
class Expr:
    """A node of a tree: a tensor with axes.  Equal `key`s mean equal tensors (whatever their axes are called)."""

    axes: Axes
    sizes: dict[str, Size]
    dtype: torch.dtype

    @property
    def key(self) -> int:
        raise NotImplementedError

    @property
    def rank(self) -> str:
        """Where it stands among the operands of a contraction: by what it reads.  The order is
        the same in every process, and for layers that are alike.
        """
        raise NotImplementedError

    @property
    def arg(self) -> Arg:
        """This node as an operand of a contraction."""
        return Arg(self.axes, Dense(), self.dtype)

    @property
    def bytes(self) -> Size:
        """Bytes of the tensor."""
        return product(self.sizes[a] for a in self.axes) * self.dtype.itemsize

    def work(self) -> Work:
        """What computing this node from its children costs."""
        raise NotImplementedError

    def seconds(self, device: Device) -> float:
        """Predicted time of computing this node from its children."""
        return device.seconds(self.work(), self.dtype)

    @property
    def children(self) -> tuple[Expr, ...]:
        """The nodes it is computed from."""
        return ()

    def nodes(self) -> dict[int, Expr]:
        """Every distinct node of the tree, children first."""
        found: dict[int, Expr] = {}
        for child in self.children:
            found.update(child.nodes())
        found[self.key] = self
        return found


@dataclass(frozen=True, eq=False)
class LeafExpr(Expr):
    """An operand as it is stored."""

    leaf: Leaf

    @cached_property
    def key(self) -> int:
        return _intern(self.leaf.key)

    @cached_property
    def rank(self) -> str:
        kinds = "".join(str(_RANKS[kind]) for kind in self.leaf.kinds)
        return f"{kinds} {self.leaf.form.name} {' '.join(s.name for s in self.leaf.sources)} {self.leaf.recipe}"

    @property
    def arg(self) -> Arg:
        return Arg(self.axes, self.leaf.form, self.dtype)

    def work(self) -> Work:
        return Work(0, 0, 0, calls=0)

    def __str__(self) -> str:
        return self.leaf.label


@dataclass(frozen=True, eq=False)
class DenseExpr(Expr):
    """An implicit operand, built."""

    child: LeafExpr

    @cached_property
    def key(self) -> int:
        return _intern(("dense", self.child.key))

    @cached_property
    def rank(self) -> str:
        return self.child.rank

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.child,)

    def work(self) -> Work:
        return Work(0, self.bytes, self.bytes, calls=2)

    def __str__(self) -> str:
        return "unfold(x)" if isinstance(self.child.leaf.form, Patches) else str(self.child)


@dataclass(frozen=True, eq=False)
class ContractExpr(Expr):
    """`a` and `b` contracted by one method."""

    a: Expr
    b: Expr
    method: Method
    pair: Pair

    @cached_property
    def key(self) -> int:
        names: dict[str, int] = {}
        pattern = tuple(
            tuple(names.setdefault(x, len(names)) for x in axes) for axes in (self.a.axes, self.b.axes, self.axes)
        )
        return _intern((self.method.name, self.a.key, self.b.key, pattern))

    @cached_property
    def rank(self) -> str:
        return f"({self.a.rank}·{self.b.rank})"

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.a, self.b)

    @property
    def arg(self) -> Arg:
        return Arg(self.axes, self.method.form(self.pair), self.dtype)

    def work(self) -> Work:
        return self.method.work(self.pair)

    def seconds(self, device: Device) -> float:
        return self.method.seconds(self.pair, device)

    def __str__(self) -> str:
        if self.pair.same:
            return f"{self.a}²"
        return f"({self.a}·{self.b})"


@dataclass(frozen=True, eq=False)
class SumExpr(Expr):
    """One operand with axes summed away (a bias: Σ_t ȳ)."""

    child: Expr

    @cached_property
    def key(self) -> int:
        kept = tuple(self.child.axes.index(x) for x in self.axes)
        return _intern(("sum", self.child.key, kept))

    @cached_property
    def rank(self) -> str:
        return self.child.rank

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.child,)

    def work(self) -> Work:
        elements = product(self.sizes[a] for a in self.child.axes)
        out = product(self.sizes[a] for a in self.axes) * self.dtype.itemsize
        return Work(elements, elements * self.dtype.itemsize, out)

    def __str__(self) -> str:
        return f"Σ{self.child}"


def trees(network: Network, concrete: Concrete) -> list[Expr]:
    """Every legal tree of the network; each leaves exactly the axes `network.out` (in the method's order).

    A leaf's lonely axes (its own, not kept) may be summed before anything else, which loses nothing.
    """
    sizes: dict[str, Size] = {axis: concrete(size) for axis, size in network.sizes.items()}
    leaves = [_leaf(leaf, sizes) for leaf in network.leaves]
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
            found = [
                expr
                for one, two in _halves(inside)
                for a, b in itertools.product(build(one), build(two))
                for expr in contractions(a, b, needed(inside), sizes, network.order or network.out)
            ]
        unique = {expr.key: expr for expr in found}
        memo[inside] = list(unique.values())
        return memo[inside]

    complete = [expr for expr in build(whole) if dense(expr).arg.dense]
    return complete + _summed_last(network, concrete)


def _summed_last(network: Network, concrete: Concrete) -> list[Expr]:
    """Trees that form the gradient of every sample and sum the samples last: worth it where it is formed anyway.
    Products of gradients and weighted sums have such trees already.
    """
    is_product = any(x.endswith("'") for x in network.sizes)
    is_weighted = any(leaf.axes == (BATCH,) for leaf in network.leaves)
    if is_product or is_weighted or set(network.order) - set(network.out) != {BATCH}:
        return []
    formed = [dense(tree) for tree in trees(Network(network.leaves, network.order), concrete)]
    return [SumExpr(tuple(x for x in e.axes if x != BATCH), e.sizes, e.dtype, e) for e in formed]


def _leaf(leaf: Leaf, sizes: dict[str, Size]) -> Expr:
    return LeafExpr(leaf.axes, sizes, leaf.dtype, leaf)


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


def contractions(a: Expr, b: Expr, needed: set[str], sizes: dict[str, Size], order: Axes = ()) -> Iterator[Expr]:
    """Contract two nodes by every method that applies, implicit operands as they are or built.

    order: that of the result's axes, which methods keep where they can, so that nothing is transposed.
    """
    if (b.rank, b.key) < (a.rank, a.key):
        a, b = b, a
    variants = [(x, y) for x in _forms(a) for y in _forms(b)]
    for x, y in variants:
        kept = [axis for axis in dict.fromkeys(x.axes + y.axes) if axis in needed]
        out = tuple(sorted(kept, key=lambda axis: order.index(axis) if axis in order else len(order)))
        self_product = x.key == y.key
        pair = Pair(x.arg, y.arg, out, sizes, same=self_product and x.axes == y.axes, self_product=self_product)
        for method in METHODS:
            if method.applies(pair):
                yield ContractExpr(method.out(pair), sizes, pair.dtype, x, y, method, pair)


def _forms(expr: Expr) -> tuple[Expr, ...]:
    built = dense(expr)
    return (expr,) if built is expr else (expr, built)


def dense(expr: Expr) -> Expr:
    """The node with its operand built, if it was implicit."""
    if isinstance(expr, LeafExpr) and isinstance(expr.leaf.form, (OneHot, Patches)):
        return DenseExpr(expr.axes, expr.sizes, expr.dtype, expr)
    return expr


def seconds(tree: Expr, device: Device) -> float:
    """Predicted time of a tree, equal nodes counted once."""
    return sum(node.seconds(device) for node in tree.nodes().values())


def peak_bytes(tree: Expr) -> int:
    """The largest sum of intermediate values, the result among them, that are needed at the same time."""
    order = list(tree.nodes().values())
    last = {child.key: index for index, node in enumerate(order) for child in node.children}
    live: dict[int, int] = {}
    peak = 0
    for index, node in enumerate(order):
        if not isinstance(node, LeafExpr):
            live[node.key] = node.bytes
        peak = max(peak, sum(live.values()))
        live = {key: size for key, size in live.items() if last.get(key, index + 1) > index}
    return peak
