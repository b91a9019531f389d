"""Layers that are alike have the same trees: these are searched for one, and moved to the leaves of the others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from psg_fx.algebra.network import Leaf, Network
from psg_fx.planner.expr import Expr, LeafExpr
from psg_fx.planner.trees import Concrete


def likeness(networks: Sequence[Network], concrete: Concrete) -> Hashable:
    """What networks have in common whose trees differ by their leaves alone: everything that a search looks at.

    Which leaves are one tensor counts across the networks, since trees share what they compute of it; and in which
    order operands stand, which goes by the names of tensors where nothing else decides.
    """
    numbers: dict[Hashable, int] = {}
    leaves = [leaf for network in networks for leaf in network.leaves]
    said = [_said(leaf, concrete, numbers.setdefault(leaf.key, len(numbers))) for leaf in leaves]
    ranks = [LeafExpr(leaf.axes, {}, leaf.dtype, leaf).rank for leaf in leaves]
    order = tuple(sorted(range(len(leaves)), key=ranks.__getitem__))
    return tuple(said), order, tuple((len(n.leaves), n.out, n.order, n.scale) for n in networks)


def _said(leaf: Leaf, concrete: Concrete, number: int) -> Hashable:
    sizes = tuple(map(concrete, leaf.sizes))
    return number, leaf.axes, sizes, leaf.dtype, leaf.form, leaf.copied, leaf.kinds, leaf.recipe


class LeavesOf:
    """Moves trees of some networks to the leaves of others that are alike."""

    def __init__(self, before: Sequence[Network], now: Sequence[Network]) -> None:
        pairs = zip((leaf for n in before for leaf in n.leaves), (leaf for n in now for leaf in n.leaves), strict=True)
        self._now = {id(old): new for old, new in pairs}
        self._moved: dict[int, Expr] = {}

    def __call__(self, tree: Expr) -> Expr:
        """The same tree of the other leaves."""
        known = self._moved.get(id(tree))
        if known is None:
            own = {"leaf": self._now[id(tree.leaf)]} if isinstance(tree, LeafExpr) else {}
            known = self._moved[id(tree)] = tree.over(*map(self, tree.children), **own)
        return known
