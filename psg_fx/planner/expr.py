"""Nodes of a tree: what each computes, from what, and at which cost.  Equal sub-networks are one node."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from psg_fx.algebra.network import Axes, Dense, Kind, Leaf, OneHot, Patches, WithTileSums
from psg_fx.planner.cost import Device, Work
from psg_fx.planner.methods import Arg, Method, Pair
from psg_fx.tensors import Size, product

_IDS: dict[Any, int] = {}
_NEXT = itertools.count()
_RANKS = {kind: rank for rank, kind in enumerate(Kind)}


def _intern(key: Any) -> int:
    """A small number that stands for a key, so that equal sub-networks compare fast."""
    return _IDS.setdefault(key, next(_NEXT))  # no two keys have one number, whichever threads ask


def numbered(*groups: Axes) -> tuple[tuple[int, ...], ...]:
    """Axes by number, in the order in which they come first: equal for operands that differ in the names of axes."""
    names: dict[str, int] = {}
    return tuple(tuple([names.setdefault(x, len(names)) for x in axes]) for axes in groups)


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

    @cached_property
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

    def over(self, *children: Expr, **changes: Any) -> Expr:
        """The same of other children.  changes: of its own fields."""
        return replace(self, **changes)

    @cached_property
    def nodes(self) -> Mapping[int, Expr]:
        """Every distinct node of the tree by its key, children first."""
        found: dict[int, Expr] = {}
        for child in self.children:
            found.update(child.nodes)
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

    @cached_property
    def arg(self) -> Arg:
        return Arg(self.axes, self.leaf.form, self.dtype)

    def work(self) -> Work:
        return Work(0, self.bytes, self.bytes) if self.leaf.copied else Work(0, 0, 0, calls=0)

    def __str__(self) -> str:
        return self.leaf.label


@dataclass(frozen=True, eq=False)
class _Unary(Expr):
    """A node with one child."""

    child: Expr

    @cached_property
    def rank(self) -> str:
        return self.child.rank

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.child,)

    def over(self, *children: Expr, **changes: Any) -> Expr:
        return super().over(child=children[0], **changes)


@dataclass(frozen=True, eq=False)
class DenseExpr(_Unary):
    """An implicit operand, built; or the tensor of a product that has its tiles' sums beside it."""

    child: LeafExpr | ContractExpr

    @cached_property
    def key(self) -> int:
        return _intern(("dense", self.child.key))

    def work(self) -> Work:
        if isinstance(self.child, ContractExpr):
            return Work(0, 0, 0, calls=0)
        return Work(0, self.bytes, self.bytes, calls=2)

    def __str__(self) -> str:
        return "unfold(x)" if isinstance(self.child.arg.form, Patches) else str(self.child)


@dataclass(frozen=True, eq=False)
class ContractExpr(Expr):
    """`a` and `b` contracted by one method."""

    a: Expr
    b: Expr
    method: Method
    pair: Pair

    @cached_property
    def key(self) -> int:
        pattern = numbered(self.a.axes, self.b.axes, self.axes)
        return _intern((self.method.name, self.a.key, self.b.key, pattern))

    @cached_property
    def rank(self) -> str:
        return f"({self.a.rank}·{self.b.rank})"

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.a, self.b)

    def over(self, *children: Expr, **changes: Any) -> Expr:
        return super().over(a=children[0], b=children[1], **changes)

    @cached_property
    def arg(self) -> Arg:
        return Arg(self.axes, self.method.form(self.pair), self.dtype)

    @property
    def bytes(self) -> Size:
        return self.method.bytes(self.pair)

    def work(self) -> Work:
        return self.method.work(self.pair)

    def seconds(self, device: Device) -> float:
        return self.method.seconds(self.pair, device)

    def __str__(self) -> str:
        if self.pair.same:
            return f"{self.a}²"
        return f"({self.a}·{self.b})"


@dataclass(frozen=True, eq=False)
class SumExpr(_Unary):
    """One operand with axes summed away (a bias: Σ_t ȳ)."""

    @cached_property
    def key(self) -> int:
        kept = tuple(self.child.axes.index(x) for x in self.axes)
        return _intern(("sum", self.child.key, kept))

    def work(self) -> Work:
        elements = product(self.sizes[a] for a in self.child.axes)
        out = product(self.sizes[a] for a in self.axes) * self.dtype.itemsize
        return Work(elements, elements * self.dtype.itemsize, out)

    def __str__(self) -> str:
        return f"Σ{self.child}"


def dense(expr: Expr) -> Expr:
    """The node as a plain tensor: with its operand built if it was implicit, without what lies beside it."""
    if isinstance(expr, (LeafExpr, ContractExpr)) and isinstance(expr.arg.form, (OneHot, Patches, WithTileSums)):
        return DenseExpr(expr.axes, expr.sizes, expr.dtype, expr)
    return expr


def rounds(tree: Expr) -> list[ContractExpr]:
    """The nodes whose results are rounded to another dtype than that of their operands."""
    return [n for n in tree.nodes.values() if isinstance(n, ContractExpr) and n.dtype is not n.pair.dtype]


def seconds(tree: Expr, device: Device) -> float:
    """Predicted time of a tree, equal nodes counted once."""
    return sum(node.seconds(device) for node in tree.nodes.values())


def peak_bytes(tree: Expr) -> int:
    """The largest sum of intermediate values, the result among them, that are needed at the same time."""
    order = list(tree.nodes.values())
    last = {child.key: index for index, node in enumerate(order) for child in node.children}
    live: dict[int, int] = {}
    peak = 0
    for index, node in enumerate(order):
        if isinstance(node, DenseExpr) and isinstance(node.child, ContractExpr):
            live.pop(node.child.key)  # it is the tensor of that pair
        if not isinstance(node, LeafExpr):
            live[node.key] = node.bytes
        peak = max(peak, sum(live.values()))
        live = {key: size for key, size in live.items() if last.get(key, index + 1) > index}
    return peak
