"""Groups of samples: the gradient of a group is the sum of those of its samples.

With the sample of row r in group ids[r], g_b = Σ_r onehot(ids)[r,b] g_r: the axis of the samples becomes one that is
summed, and `onehot(ids)` a further leaf, as in an embedding.  Every ask is as it is for samples.

That leaf is there for groups of very different sizes alone.  Else the rows of every operand are brought in order of
their groups, `[G, S, ..]` with S the size of the largest one and zeros where a group has fewer; then a group is a
sample with S times as many positions, and every tree is as it is for samples, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch

from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.network import BATCH, ROWS, Kind, Leaf, Members, Network, OneHot, Patches, Source

MEMBERS = Source(Kind.GIVEN, "members")
"""The numbers of the samples of each group, `[G, S]`; -1 where a group has fewer than S."""

IDS = Source(Kind.GIVEN, "ids")
"""The group of each row, `[B]`, -1 for none."""

COUNT = Source(Kind.GIVEN, "groups")
"""The number of groups, with those that have no samples and are not among the G: [] as a float."""

Layout = Literal["blocks", "gathered", "scattered"]


@dataclass(frozen=True)
class Grouping:
    """How the samples of a call are grouped.

    layout: "blocks": all groups have S samples and these lie in order, so that rows of groups are a view; "gathered":
    they are brought in order; "scattered": they stay where they are, and are summed by their groups.
    groups, largest, samples: G, S and B of the call that is planned for.
    """

    layout: Layout
    groups: int
    largest: int
    samples: int


class Groups:
    """Makes gradients of samples those of groups, for the sizes that are planned for.

    batch: the symbol of B in the sizes of the networks.  Sizes of the result are written in one symbol, that of G.
    """

    def __init__(self, grouping: Grouping, batch: sympy.Symbol) -> None:
        self.symbol = sympy.Symbol("G", integer=True, positive=True)
        self.size = max(grouping.groups, 2)  # an axis of size 1 would have no role in a contraction
        self._samples = self.symbol * sympy.Rational(max(grouping.samples, 2), self.size)
        self._layout, self._batch, self._largest = grouping.layout, batch, sympy.Integer(max(grouping.largest, 2))

    def gradient(self, gradient: ParameterGradient) -> ParameterGradient:
        """The gradient of groups."""
        return replace(gradient, terms=tuple(map(self._term, gradient.terms)))

    def _term(self, term: Term) -> Term:
        """Its network for groups, and that for samples."""
        g, positions = term.network, _positions(term.network)
        samples = replace(g, leaves=tuple(self._samples_of(leaf) for leaf in g.leaves))
        if self._layout == "scattered":
            rows = tuple(_by_row(leaf) if BATCH in leaf.axes else leaf for leaf in samples.leaves)
            rows = (*rows, self._members(g.leaves[0].dtype))
        else:
            ordered = InOrder(self._layout, MEMBERS, self.symbol, self._largest)
            rows = tuple(ordered.leaf(leaf, positions) if BATCH in leaf.axes else leaf for leaf in g.leaves)
        return replace(term, network=replace(g, leaves=rows), of_samples=samples)

    def _members(self, dtype: torch.dtype) -> Leaf:
        """Which row belongs to which group."""
        sizes = (self._samples, self.symbol)
        return Leaf("onehot(groups)", (IDS,), "groups", (ROWS, BATCH), sizes, Members(), dtype)

    def _samples_of(self, leaf: Leaf) -> Leaf:
        return replace(leaf, sizes=tuple(map(self._counted, leaf.sizes)))

    def _counted(self, size: sympy.Expr) -> sympy.Expr:
        """A size in B, written in G."""
        return sympy.sympify(size).subs(self._batch, self._samples)


@dataclass(frozen=True)
class InOrder:
    """Rows brought in order of what they belong to, by `members` `[G, S]`.

    layout: of its name, for recipes.  count: the symbol of G.  largest: S.
    """

    layout: str
    members: Source
    count: sympy.Symbol
    largest: sympy.Integer

    def leaf(self, leaf: Leaf, positions: str) -> Leaf:
        """`[b, .., t, ..]` with samples as `[b, .., r, ..]` with groups, r the rows times t, rows first; where there
        are no such positions, as `[b, r, ..]`.
        """
        assert leaf.axes[0] == BATCH, leaf
        assert ROWS not in leaf.axes, leaf
        place = leaf.axes.index(positions) if positions else 1
        axes = (*leaf.axes[:place], ROWS, *leaf.axes[place + bool(positions) :])
        sizes: dict[str, sympy.Expr] = dict(zip(leaf.axes, leaf.sizes, strict=True))
        sizes |= {BATCH: self.count, ROWS: self.largest * sizes.get(positions, sympy.Integer(1))}
        stored = 1 if isinstance(leaf.form, Patches) else place  # what is folded with the samples, not the positions
        build, masked = leaf.build, self.layout != "blocks" and not isinstance(leaf.form, OneHot)

        def rows(*tensors: torch.Tensor) -> torch.Tensor:
            found = rows_of_groups(build(*tensors[:-1]), tensors[-1], masked)
            return found.movedim(1, stored).flatten(stored, stored + 1) if positions else found

        return Leaf(
            leaf.label, (*leaf.sources, self.members), f"{self.layout} {positions} {leaf.recipe}", axes,
            tuple(sizes[axis] for axis in axes), leaf.form, leaf.dtype, rows,
        )  # fmt: skip


@dataclass(frozen=True)
class RowsOfSamples:
    """How many rows there are along one axis in the call that is planned for, and where their samples stand.

    largest: the number of rows of the largest sample, where they are brought in order; None: they stay where they are.
    """

    number: int
    count: sympy.Symbol
    rows: int
    largest: int | None = None


def members_of(axis: int) -> Source:
    """The rows of each sample along an axis, `[B, S]`, an input; -1 where a sample has fewer than S."""
    return Source(Kind.GIVEN, f"members.{axis}")


def ids_of(axis: int) -> Source:
    """The sample of each row of an axis, `[R]`, a value of the graph."""
    return Source(Kind.GIVEN, f"ids.{axis}")


class Memberships:
    """Makes gradients of rows those of the samples that they belong to: g_b = Σ_r onehot(ids)[r,b] g_r, at each site
    with the ids of its rows.  Sites whose samples lie in a dim of their own are as they are.

    batch: the symbol of B.  Sizes of the result are written in it.
    """

    def __init__(self, axes: Sequence[RowsOfSamples], batch: sympy.Symbol, samples: int) -> None:
        self._axes = {axis.count: axis for axis in axes}
        self._sizes = {a.count: batch * sympy.Rational(max(a.rows, 2), max(samples, 2)) for a in axes}
        self._batch = batch

    def gradient(self, gradient: ParameterGradient) -> ParameterGradient:
        """The gradient of samples."""
        return replace(gradient, terms=tuple(map(self._term, gradient.terms)))

    def _term(self, term: Term) -> Term:
        """Its network for samples, and that for rows."""
        g = term.network
        axis = self._axes.get(g.sizes[BATCH])
        rows = replace(g, leaves=tuple(self._counted(leaf) for leaf in g.leaves))
        if axis is None:
            return replace(term, network=rows)
        if axis.largest is not None:
            largest = sympy.Integer(max(axis.largest, 2))
            ordered = InOrder(f"samples {axis.number}", members_of(axis.number), self._batch, largest)
            places = _positions(rows)
            leaves = tuple(ordered.leaf(leaf, places) if BATCH in leaf.axes else leaf for leaf in rows.leaves)
            return replace(term, network=replace(g, leaves=leaves), of_samples=rows)
        leaves = tuple(replace(leaf, axes=tuple(ROWS if a == BATCH else a for a in leaf.axes)) for leaf in rows.leaves)
        sizes, ids = (self._sizes[axis.count], self._batch), ids_of(axis.number)
        members = Leaf("onehot(ids)", (ids,), ids.name, (ROWS, BATCH), sizes, Members(), g.leaves[0].dtype)
        return replace(term, network=replace(g, leaves=(*leaves, members)), of_samples=rows)

    def _counted(self, leaf: Leaf) -> Leaf:
        return replace(leaf, sizes=tuple(sympy.sympify(size).subs(self._sizes) for size in leaf.sizes))


def _by_row(leaf: Leaf) -> Leaf:
    """The samples as rows; those of no group are zero."""
    build, masked = leaf.build, not isinstance(leaf.form, OneHot)

    def rows(*tensors: torch.Tensor) -> torch.Tensor:
        x, ids = build(*tensors[:-1]), tensors[-1]
        return x.masked_fill((ids < 0).reshape(-1, *[1] * (x.ndim - 1)), 0) if masked else x

    axes = tuple(ROWS if axis == BATCH else axis for axis in leaf.axes)
    return replace(leaf, sources=(*leaf.sources, IDS), recipe=f"scattered {leaf.recipe}", axes=axes, build=rows)


def _positions(g: Network) -> str:
    """The summed axis that the rows of a group are put together with: one of all operands with samples and of no other,
    that lies right behind the samples (so that this moves nothing) or stands for patches; "" for none.
    """
    carrying = [leaf for leaf in g.leaves if BATCH in leaf.axes]
    patches = next((leaf for leaf in carrying if isinstance(leaf.form, Patches)), None)
    axis = (patches or carrying[0]).axes[1:2]
    if not axis or axis[0] in g.out:
        return ""
    alone = all((axis[0] in leaf.axes) == (BATCH in leaf.axes) for leaf in g.leaves)
    behind = patches is not None or all(leaf.axes[1] == axis[0] for leaf in carrying)
    assert alone or patches is None, g
    return axis[0] if alone and behind else ""


def rows_of_groups(x: torch.Tensor, members: torch.Tensor, masked: bool) -> torch.Tensor:
    """`[B, ..]` as `[G, S, ..]`; masked: rows that a group does not have are zero."""
    rows = x[members]
    if not masked:
        return rows
    return rows.masked_fill((members < 0).reshape(*members.shape, *[1] * (x.ndim - 1)), 0)
