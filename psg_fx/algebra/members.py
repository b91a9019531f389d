"""Rows that belong to what is asked: the nodes of a graph, the samples of a user, the nodes of a user's graphs.

With row r of sample (or group) ids[r], g_b = Σ_r onehot(ids)[r,b] g_r: the axis of the rows becomes one that is summed,
and `onehot(ids)` a further leaf, as in an embedding.  Every ask is as it is for samples.

That leaf is there where one has many more rows than the others alone.  Else the rows of every operand are brought in
order, `[G, S, ..]` with S the size of the largest one and zeros where there are fewer; then a group is a sample with S
times as many positions, and every tree is as it is for samples, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch

from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.network import BATCH, ROWS, Kind, Leaf, Members, Network, OneHot, Patches, Source

MEMBERS = Source(Kind.GIVEN, "members")
"""The numbers of the samples of each group, `[G, S]`; -1 where a group has fewer than S."""

IDS = Source(Kind.GIVEN, "ids")
"""The group of each sample, `[B]`, -1 for none."""

COUNT = Source(Kind.GIVEN, "groups")
"""The number of groups, with those that have no samples and are not among the G: [] as a float."""

GROUPS = sympy.Symbol("G", integer=True, positive=True)
"""The number of groups that the graph has, in sizes of networks."""

Layout = Literal["blocks", "gathered", "scattered"]


def members_of(axis: int) -> Source:
    """The rows of each sample or group along an axis, `[B, S]`, an input; -1 where there are fewer than S."""
    return Source(Kind.GIVEN, f"members.{axis}")


def ids_of(axis: int) -> Source:
    """The sample of each row of an axis, `[R]`, a value of the graph."""
    return Source(Kind.GIVEN, f"ids.{axis}")


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


@dataclass(frozen=True)
class Belonging:
    """How the rows of one axis belong to what is asked.

    rows, largest: how many there are in the call that is planned for, and how many the largest one has.
    members: where they are brought in order, the rows of each, `[G, S]`.
    whose: where they stay, the number of each row's sample or group; or that of its sample, then the group of each.
    partly: some may belong to none.
    """

    layout: Layout
    rows: int
    largest: int
    members: Source
    whose: tuple[Source, ...]
    partly: bool

    @classmethod
    def of_samples(cls, grouping: Grouping) -> Belonging:
        """Samples, to groups of them."""
        return cls(grouping.layout, grouping.samples, grouping.largest, MEMBERS, (IDS,), partly=True)

    @classmethod
    def of_rows(cls, axis: int, rows: int, largest: int | None, grouped: bool) -> Belonging:
        """Rows of samples, to these, or to groups of these.  largest: None where they stay where they are."""
        whose = (ids_of(axis), IDS) if grouped else (ids_of(axis),)
        layout: Layout = "scattered" if largest is None else "gathered"
        return cls(layout, rows, largest or 0, members_of(axis), whose, partly=grouped)

    @property
    def size(self) -> sympy.Integer:
        """S; an axis of size 1 would have no role in a contraction."""
        return sympy.Integer(max(self.largest, 2))

    @property
    def onehot(self) -> str:
        """How the leaf prints that says which row belongs to which."""
        return "onehot(groups)" if IDS in self.whose else "onehot(ids)"


class Memberships:
    """Makes gradients of rows those of what the rows belong to, at each site by the ids of its rows, for the sizes that
    are planned for.

    axes: how rows belong, by the symbol of their number; sites of other rows are of what is asked, and stay as they
    are.  symbol: of the number of what is asked, in which sizes of the result are written; size: what it is.
    """

    def __init__(self, axes: Mapping[sympy.Symbol, Belonging], symbol: sympy.Symbol, size: int) -> None:
        self._axes, self._symbol = axes, symbol
        self._sizes = {count: symbol * sympy.Rational(max(a.rows, 2), max(size, 2)) for count, a in axes.items()}

    def gradient(self, gradient: ParameterGradient) -> ParameterGradient:
        """The gradient of what is asked."""
        return replace(gradient, terms=tuple(map(self._term, gradient.terms)))

    def _term(self, term: Term) -> Term:
        """Its network for what is asked, and that for rows."""
        count = term.network.sizes[BATCH]
        rows = replace(term.network, leaves=tuple(map(self._counted, term.network.leaves)))
        if count not in self._axes:
            return replace(term, network=rows)
        axis = self._axes[count]
        if axis.layout == "scattered":
            leaves = [_by_row(leaf, axis) if BATCH in leaf.axes else leaf for leaf in rows.leaves]
            leaves.append(_onehot(axis, (self._sizes[count], self._symbol), rows.leaves[0].dtype))
        else:
            places = _positions(rows)
            leaves = [self._ordered(leaf, places, axis) if BATCH in leaf.axes else leaf for leaf in rows.leaves]
        return replace(term, network=replace(rows, leaves=tuple(leaves)), of_samples=rows)

    def _counted(self, leaf: Leaf) -> Leaf:
        """Its sizes, written in the number of what is asked."""
        return replace(leaf, sizes=tuple(sympy.sympify(size).subs(self._sizes) for size in leaf.sizes))

    def _ordered(self, leaf: Leaf, positions: str, axis: Belonging) -> Leaf:
        """`[b, .., t, ..]` of rows as `[b, .., r, ..]` of what they belong to, r the rows times t, rows first; where
        there are no such positions, as `[b, r, ..]`.
        """
        assert leaf.axes[0] == BATCH, leaf
        assert ROWS not in leaf.axes, leaf
        place = leaf.axes.index(positions) if positions else 1
        axes = (*leaf.axes[:place], ROWS, *leaf.axes[place + bool(positions) :])
        sizes: dict[str, sympy.Expr] = dict(zip(leaf.axes, leaf.sizes, strict=True))
        sizes |= {BATCH: self._symbol, ROWS: axis.size * sizes.get(positions, sympy.Integer(1))}
        stored = 1 if isinstance(leaf.form, Patches) else place  # what is folded with the samples, not the positions
        build, masked = leaf.build, axis.layout != "blocks" and not isinstance(leaf.form, OneHot)

        def rows(*tensors: torch.Tensor) -> torch.Tensor:
            found = rows_of_groups(build(*tensors[:-1]), tensors[-1], masked)
            return found.movedim(1, stored).flatten(stored, stored + 1) if positions else found

        return Leaf(
            leaf.label, (*leaf.sources, axis.members), f"{axis.layout} {positions} {leaf.recipe}", axes,
            tuple(sizes[x] for x in axes), leaf.form, leaf.dtype, rows, copied=axis.layout != "blocks",
        )  # fmt: skip


def _whose(numbers: torch.Tensor, groups: torch.Tensor | None = None) -> torch.Tensor:
    """What each row belongs to: the sample, or of this the group."""
    return numbers if groups is None else groups[numbers]


def _onehot(axis: Belonging, sizes: tuple[sympy.Expr, ...], dtype: torch.dtype) -> Leaf:
    """Which row belongs to which, `[r, b]`."""
    recipe = " of ".join(source.name for source in reversed(axis.whose))
    return Leaf(axis.onehot, axis.whose, recipe, (ROWS, BATCH), sizes, Members(), dtype, _whose)


def _by_row(leaf: Leaf, axis: Belonging) -> Leaf:
    """The samples as rows; those that belong to none are zero."""
    named = replace(leaf, axes=tuple(ROWS if x == BATCH else x for x in leaf.axes))
    if not axis.partly:
        return named
    build, masked, own = leaf.build, not isinstance(leaf.form, OneHot), len(leaf.sources)

    def rows(*tensors: torch.Tensor) -> torch.Tensor:
        x, ids = build(*tensors[:own]), _whose(*tensors[own:])
        return x.masked_fill((ids < 0).reshape(-1, *[1] * (x.ndim - 1)), 0) if masked else x

    return replace(named, sources=(*leaf.sources, *axis.whose), recipe=f"scattered {leaf.recipe}", build=rows)


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
