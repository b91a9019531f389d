"""Rows of several axes one behind the other: the edges of graphs, and a self-loop for each node.

    f(cat(u, v)) = cat(f(u), f(v)) for every f that treats each row by itself
    index_add(z, cat(p, q), cat(u, v)) = index_add(index_add(z, p, u), q, v)

E + N rows are no axis of their own, so nothing could be said of what lies along them.  But what is computed from them
row by row is computed from those of each axis, and where they are added to others, one axis is added after the other
(`row_writes.py`).  That f treats each row by itself is proven as it is of samples (`region.py`).

Rows that a mask picks from an axis, `edge_index[:, mask]`, are taken in the same way: all rows are computed, and those
that are not picked count nothing where they are added.  They take no part in anything else: where they meet a value
that is not of these rows alone, which may be a parameter, they are numbers before and after, with no gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import PsgError
from psg_fx.graph import facts
from psg_fx.source import provenance

from .picked import asserts
from .region import ROWS, TimesRows, Unfit
from .row_rewriting import RowRewriting
from .row_writes import Write, write_of, written
from .values import bound, not_shown, op_name, symbolic_values

aten = torch.ops.aten
_NEW = ("aten.new_zeros", "aten.new_ones", "aten.new_full")
_FILLS = ("aten.zeros", "aten.ones", "aten.full", "aten.expand", *_NEW)
"""Ops whose rows are all the same, wherever they are."""
_FIX = (
    "compute each row by itself, and add rows by index_add, scatter_add or scatter_reduce; self-loops can be added to "
    "the edges before the step (add_self_loops=False, torch_geometric.transforms.AddRemainingSelfLoops)"
)
_OTHERS = 7
"""How many rows and samples other values have where ops are tried."""


@dataclass(frozen=True)
class Piece:
    """Rows of one axis.  count: how many.  kept: a mask [count] of those that count, None for all."""

    count: sympy.Symbol
    kept: Node | None = None


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
        if axis is None or (op_name(node) in _NEW and not axis.has_rows(node)):
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
            shape, axis = facts.shape(n.meta["val"]), self.along.get(n)
            if axis is not None and axis.place(n) == dim:
                symbols += axis.symbols
                parts += [part.twins[n] for part in axis.parts]
                others[n] = axis
            elif (
                axis is None
                and shape[dim] in self.pieces
                and not any(s.free_symbols for s in shape[:dim] + shape[dim + 1 :])
            ):
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
            elif op_name(node) in _NEW and any(axis.has_rows(node.all_input_nodes[0]) for axis in done):
                value, source = node.meta["val"], self.sizes.source(done[0].parts[0].count)[0]
                node.kwargs = {**node.kwargs, "dtype": value.dtype, "device": value.device}
                node.args = (source, *node.args[1:])


class Sizes:
    """Numbers of rows, read off the inputs."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.made: dict[sympy.Expr, Node] = {}

    def of(self, count: sympy.Symbol, times: int = 1) -> Node:
        """A node with the number of rows, so many times."""
        if count * times in self.made:
            return self.made[count * times]
        graph = self.gm.graph
        if times == 1:
            source, dim = self.source(count)
            with graph.inserting_after(facts.placeholders(self.gm)[-1]):
                made = graph.call_function(aten.sym_size.int, (source, dim))
            made.meta["val"] = source.meta["val"].shape[dim]
        else:
            one = self.of(count)
            with graph.inserting_after(one):
                made = graph.call_function(operator.mul, (one, times))
            made.meta["val"] = one.meta["val"] * times
        self.made[count * times] = made
        return made

    def source(self, count: sympy.Symbol) -> tuple[Node, int]:
        """An input, and the dim in which it has so many rows."""
        for n in facts.placeholders(self.gm):
            value = n.meta.get("val")
            shape = facts.shape(value) if isinstance(value, Tensor) else ()
            if count in shape:
                return n, shape.index(count)
        raise Unfit


class Part(RowRewriting):
    """What is computed along one part of an axis.  cut: twins that are numbers where rows are not picked."""

    def __init__(self, gm: GraphModule, piece: Piece) -> None:
        super().__init__(gm, (), piece.count)
        self.kept = piece.kept
        self.numbers: set[Node] = set()
        self.cut: set[Node] = set()
        self.left_out: dict[tuple[int, int], Node] = {}

    def without_others(self, node: Node, twin: Node, dim: int) -> Node:
        """A twin with a number in the place of rows that are not picked: no special one."""
        if self.kept is None or not twin.meta["val"].is_floating_point() or twin in self.cut:
            return twin
        others = self.others(node, twin.meta["val"].ndim, dim)
        fill = 0.3 + 0.07 * len(self.cut)
        found = self.made(node, aten.masked_fill.Scalar, twin, others, fill)
        self.cut.add(found)
        self.inside.append(found)
        return found

    def others(self, node: Node, ndim: int, dim: int) -> Node:
        """The rows that are not picked, in dim `dim` of so many."""
        if (ndim, dim) not in self.left_out:
            assert self.kept is not None
            others = self.made(node, aten.logical_not.default, self.kept)
            self.left_out[ndim, dim] = self.made(
                node, aten.reshape.default, others, [-1 if d == dim else 1 for d in range(ndim)]
            )
            self.entries[self.left_out[ndim, dim]] = dim
        return self.left_out[ndim, dim]

    def made(self, node: Node, target: Any, *args: Any) -> Node:
        """A new node in front of another one."""
        with self.gm.graph.inserting_before(node):
            found = self.gm.graph.call_function(target, args)
        found.meta = provenance(node)
        found.meta["val"] = self._run(found)
        return found

    def _example(self, node: Node, value: Tensor) -> tuple[Tensor, int | None]:
        """Rows and samples of other axes are there in some number."""
        place = self.entries.get(node)
        shape = [int(size.subs(dict.fromkeys(size.free_symbols, _OTHERS))) for size in facts.shape(value)]
        if place is not None:
            shape[place] = ROWS
        return torch.empty(shape, dtype=value.dtype, device="meta"), place

    def _number(self, node: Node) -> Any:
        size = facts.expr(node.meta["val"])
        if node in self.numbers:
            return TimesRows(int(size / self.count))
        return int(size.subs(dict.fromkeys(size.free_symbols, _OTHERS)))


class Concatenation:
    """What is computed along one axis that is made of others.

    symbols: what counts the rows of each part, as shapes have it.  total: their sum.
    nodes: the values along it that each part has.  halves: ops with several outputs of which those that are not picked
    have a part.  writes: where rows are added or written to those of another axis.
    made_of: other such axes that it is made of.  handed: twins of which another one is made, and where their rows lie.
    entered: the nodes at which its rows begin.  missed: those that read its rows in another way than one by one.
    reason: why they are not treated one by one.
    """

    def __init__(
        self, gm: GraphModule, symbols: tuple[sympy.Symbol, ...], pieces: Sequence[Piece], sizes: Sizes
    ) -> None:
        self.gm, self.symbols, self.sizes = gm, symbols, sizes
        self.total = sympy.Add(*symbols)
        self.parts = [Part(gm, piece) for piece in pieces]
        self.nodes: set[Node] = set()
        self.halves: set[Node] = set()
        self.writes: dict[Node, Write] = {}
        self.made_of: set[Concatenation] = set()
        self.handed: dict[Node, int] = {}
        self.proven = False
        self.entered: list[Node] = []
        self.missed: list[Node] = []
        self.reason: PsgError | None = None

    def place(self, node: Node) -> int:
        """The dim of a value in which its rows lie, one beside the other; -1 for none."""
        value = node.meta["val"]
        shape = facts.shape(value) if isinstance(value, Tensor) else ()
        return shape.index(self.total) if shape.count(self.total) == 1 else -1

    def times(self, size: sympy.Expr) -> sympy.Expr:
        """The c of c rows; 0 for other sizes."""
        numerator, denominator = sympy.cancel(size / self.total).as_numer_denom()
        return numerator if size.free_symbols and denominator == 1 else sympy.Integer(0)

    def has_rows(self, node: Node) -> bool:
        """Whether a value has this axis, by its shape."""
        return any(self.times(size) != 0 for t in facts.tensors(node.meta.get("val")) for size in facts.shape(t))

    def enter(self, node: Node, values: Sequence[Node], dim: int) -> None:
        """A node is these values, one behind the other along a dim."""
        self.nodes.add(node)
        self.entered.append(node)
        for part, value in zip(self.parts, values, strict=True):
            twin = part.made(node, aten.alias.default, value)
            part.entries[twin] = dim
            part.twins[node] = part.without_others(node, twin, dim)

    def reads(self, node: Node) -> bool:
        """Whether a node may be computed row by row, by its inputs; if it writes rows elsewhere, that is noted."""
        if not all(self.provided(n) for n in node.all_input_nodes):
            return False
        write = write_of(node, self.nodes.__contains__)
        if write is None:
            return not any(n in symbolic_values(node, s) for s in self.total.free_symbols for n in self.numbers(node))
        fits = all(self.place(n) == dim for n, dim in write.places.items()) and not self.has_rows(write.onto)
        if fits and (write.adds or all(part.kept is None for part in self.parts)):
            self.writes[node] = write
        return False

    def numbers(self, node: Node) -> list[Node]:
        """The numbers of rows that enter a node."""
        found = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.SymInt)]
        return [n for n in found if self.times(facts.expr(n.meta["val"])) != 0]

    def provided(self, n: Node) -> bool:
        """Whether an input is the same for each part, or can be had for each."""
        value = n.meta.get("val")
        if n in self.nodes:
            return True
        if isinstance(value, torch.SymInt):
            return self.count(n)
        if not self.has_rows(n):
            return isinstance(value, Tensor) or not isinstance(value, (torch.SymFloat, torch.SymBool))
        return op_name(n) in _FILLS and self.reads(n) and self.copy(n)

    def count(self, n: Node) -> bool:
        """A number of all rows is that of each part."""
        times = self.times(facts.expr(n.meta["val"]))
        if times == 0 or n in self.parts[0].twins:
            return True
        if not times.is_Integer:
            return False
        for part in self.parts:
            part.twins[n] = self.sizes.of(part.count, int(times))
            part.numbers.add(part.twins[n])
        return True

    def copy(self, node: Node) -> bool:
        """The op for each part."""
        half = self.is_half(node)
        if half and not all(self.cut(node, n) for n in node.all_input_nodes if n in self.nodes):
            return False
        if not all(part.copied(node) for part in self.parts):
            return False
        self.nodes.add(node)
        if half and isinstance(node.meta["val"], Tensor):
            return self.cut(node, node)
        self.halves |= {node} if half else set()
        return True

    def is_half(self, node: Node) -> bool:
        """Whether a node has a part that is not made of these rows, such as a parameter."""
        others = [n.meta["val"] for n in node.all_input_nodes if n not in self.nodes]
        given = any(isinstance(v, Tensor) and v.is_floating_point() for v in others)
        return given or (node.target is operator.getitem and node.args[0] in self.halves)

    def cut(self, node: Node, n: Node) -> bool:
        """Rows of a value that are not picked have no part in what follows, nor in derivatives."""
        place, value = self.place(n), n.meta["val"]
        if all(part.kept is None for part in self.parts) or not isinstance(value, Tensor):
            return True
        if place < 0 or not value.is_floating_point():
            return not value.is_floating_point()
        for part in self.parts:
            part.twins[n] = part.without_others(node, part.twins[n], place)
        return True

    def run(self) -> None:
        """Let each part write by itself, once it is proven that each row is treated by itself."""
        if not all(axis.proven for axis in self.made_of):
            raise Unfit
        part = self.parts[0]
        sources = {part.twins[n]: dim for write in self.writes.values() for n, dim in write.places.items()}
        sources |= self.handed
        if not sources:
            raise Unfit
        part.prove_places(sources)
        self.proven = True
        for node, write in self.writes.items():
            node.replace_all_uses_with(self.written(node, replace(write, onto=bound(node)["self"])))

    def refusal(self) -> PsgError | None:
        """Why its rows are needed as a whole."""
        if self.reason is not None:
            return type(self.reason)(self.reason.what, where=self.reason.where, why=self.reason.why, fix=_FIX)
        if not self.missed:
            return None
        node = self.missed[0]
        why = f"it needs all rows of %{self.entered[0].name}, which are those of several axes, or picked by a mask"
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            why = (
                "it draws at random for rows of several axes, or that a mask picks: taken apart, these are other draws"
            )
        return not_shown(node, why, _FIX)

    def written(self, node: Node, write: Write) -> Node:
        """The same of each part; pointers that are numbers in the code come last."""
        parts = sorted(self.parts, key=lambda part: write.adds and _is_plain(part.twins[write.index]))
        given = [(part.twins[write.index], part.twins[write.source]) for part in parts]
        kept = [part.kept for part in parts if part.kept is not None]

        def run(onto: Tensor, *values: Tensor) -> Tensor:
            masks = iter(values[2 * len(parts) :])
            found = []
            for k, part in enumerate(parts):
                index, source = values[2 * k : 2 * k + 2]
                shape = [-1 if d == write.places[write.source] else 1 for d in range(source.ndim)]
                found.append((index, source, None if part.kept is None else next(masks).reshape(shape)))
            return written(write, onto, found)

        return parts[0].spliced(node, run, write.onto, *(n for pair in given for n in pair), *kept)


def _is_plain(node: Node) -> bool:
    """Whether a value is made of numbers in the code alone."""
    above = facts.ancestors([node], through=lambda n: isinstance(n.meta.get("val"), (Tensor, tuple, list)))
    return not any(n.op == "placeholder" and isinstance(n.meta["val"], Tensor) for n in above)
