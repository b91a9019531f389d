"""Rows of several axes one behind the other: the edges of graphs, and a self-loop for each node.

    f(cat(u, v)) = cat(f(u), f(v)) for every f that treats each row by itself
    index_add(z, cat(p, q), cat(u, v)) = index_add(index_add(z, p, u), q, v)

E + N rows are no axis of their own, so nothing could be said of what lies along them.  But what is computed from them
row by row is computed from those of each axis, and where they are added to others, one axis is added after the other
(`writes.py`).  That f treats each row by itself is proven as it is of samples (`region.py`).

Rows that a mask picks from an axis, `edge_index[:, mask]`, are taken in the same way: all rows are computed, and those
that are not picked count nothing where they are added.  They take no part in anything else: where they meet a value
that is not of these rows alone, which may be a parameter, they are numbers before and after, with no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts

from ..arguments import bound, op_name
from .parts import NEW, Concatenation, Piece, Sizes
from .picked import asserts
from .region import Unfit

aten = torch.ops.aten


def take_rows_apart(gm: GraphModule) -> dict[Node, PsgError]:
    """Rewrite what is computed from rows of several axes one behind the other.

    What cannot be rewritten stays, to be refused: the nodes where such rows begin, and what is to be said of them.
    """
    if not facts.graph_facts(gm).rows:
        return {}
    walk = Walk(gm)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            walk.visit(node)
    for axis in walk.axes.values():
        try:
            axis.run()
        except Unfit as unfit:
            axis.reason = unfit.__cause__ if isinstance(unfit.__cause__, PsgError) else None
    if walk.axes:
        walk.clean()
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return walk.refusals()


class Walk:
    """Finds the axes that are made of others.

    pieces: what a symbol in the shapes counts: samples, rows of an axis, or those of them that a mask picks.
    axes: the symbols of an axis, in order -> what is computed along it.  along: a node -> its axis.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm, info = gm, facts.graph_facts(gm)
        self.rows = set(info.rows)
        self.pieces = {count: Piece(count) for count in (info.batch, *info.rows)}
        self.axes: dict[tuple[sympy.Symbol, ...], Concatenation] = {}
        self.along: dict[Node, Concatenation] = {}
        self.sizes = Sizes(gm)

    def visit(self, node: Node) -> None:
        """Whether a node has rows of such an axis, and what it is for each of the others."""
        if self.picking(node) or self.joining(node):
            return
        axes = {self.along[n] for n in node.all_input_nodes if n in self.along}
        axis = axes.pop() if len(axes) == 1 else None
        if axis is None or (op_name(node) in NEW and not axis.has_rows(node)):
            return
        if axis.reads(node) and axis.copy(node):
            self.along[node] = axis
        elif node not in axis.writes:
            axis.missed.append(node)

    def picking(self, node: Node) -> bool:
        """`x[.., mask, ..]` with a mask of rows of one axis."""
        if node.target is not aten.index.Tensor:
            return False
        given = bound(node)
        at = [d for d, n in enumerate(given["indices"]) if n is not None]
        mask, x = given["indices"][at[0]], given["self"]
        if len(at) != 1 or mask.meta["val"].dtype is not torch.bool or mask.meta["val"].ndim != 1:
            return False
        (count,), picked = facts.shape(mask.meta["val"]), facts.shape(node.meta["val"])[at[0]]
        known = count in self.rows and isinstance(picked, sympy.Symbol) and facts.shape(x.meta["val"])[at[0]] == count
        if not known or x in self.along or self.pieces.setdefault(picked, Piece(count, mask)) != Piece(count, mask):
            return False
        self.enter((picked,), node, [x], at[0])
        return True

    def enter(self, symbols: tuple[sympy.Symbol, ...], node: Node, parts: Sequence[Node], dim: int) -> Concatenation:
        """A node is these values along an axis."""
        axis = self.axes.get(symbols) or Concatenation(self.gm, symbols, [self.pieces[s] for s in symbols], self.sizes)
        axis.enter(node, parts, dim)
        self.axes[symbols] = self.along[node] = axis
        return axis

    def joining(self, node: Node) -> bool:
        """`cat([u, v], d)` whose parts have rows in dim d."""
        if op_name(node) != "aten.cat":
            return False
        given = bound(node)
        tensors, dim = list(given["tensors"]), int(given["dim"]) % node.meta["val"].ndim
        symbols: list[sympy.Symbol] = []
        parts: list[Node] = []
        others: dict[Node, Concatenation] = {}
        for n in tensors:
            shape = facts.shape(n.meta["val"])
            axis = self.along.get(n) or self.filled(n, shape[dim])
            if axis is not None and axis.place(n) == dim:
                symbols += axis.symbols
                parts += [part.twins[n] for part in axis.parts]
                others[n] = axis
            elif axis is None and self.is_whole(shape[dim]) and sum(bool(s.free_symbols) for s in shape) == 1:
                symbols.append(shape[dim])
                parts.append(n)
            else:
                return False
        if len(symbols) < 2 or not self.rows.intersection(self.pieces[s].count for s in symbols):
            return False
        found = self.enter(tuple(symbols), node, parts, dim)
        for n, axis in others.items():
            found.made_of.add(axis)
            axis.handed[axis.parts[0].twins[n]] = dim
        return True

    def is_whole(self, size: sympy.Expr) -> bool:
        """Whether a size counts all rows of an axis, or the samples."""
        return size in self.pieces and self.pieces[size].kept is None

    def filled(self, node: Node, size: sympy.Expr) -> Concatenation | None:
        """The axis of a value that is the same for all rows that a mask picks."""
        axis = self.axes.get((size,))
        return axis if axis is not None and axis.provided(node) else None

    def refusals(self) -> dict[Node, PsgError]:
        """What is to be said of nodes at which rows begin that could not be taken apart."""
        found: dict[Node, PsgError] = {}
        for axis in self.axes.values():
            if (reason := axis.refusal()) is not None:
                found |= dict.fromkeys((n for own in (axis, *axis.made_of) for n in own.entered), reason)
        return found

    def clean(self) -> None:
        """Drop what is left of axes that were taken apart: shapes and dtypes that were read off them, and checks."""
        done = [axis for axis in self.axes.values() if axis.proven]
        gone = facts.descendants(n for axis in done for n in axis.nodes)
        for node in list(self.gm.graph.nodes):
            if asserts(node) and node in gone:
                self.gm.graph.erase_node(node)
            elif op_name(node) in NEW and any(axis.has_rows(node.all_input_nodes[0]) for axis in done):
                value, source = node.meta["val"], self.sizes.source(done[0].parts[0].count)[0]
                node.kwargs = {**node.kwargs, "dtype": value.dtype, "device": value.device}
                node.args = (source, *node.args[1:])
