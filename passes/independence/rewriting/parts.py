"""Along an axis that is made of others: what is computed row by row, for each part of it (`concatenated.py`)."""

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
from psg_fx.graph.nodes import multiple, size_of
from psg_fx.graph.same_op import draws
from psg_fx.source import provenance

from ..arguments import bound, op_name, symbolic_values
from ..refused import not_shown
from .region import ROWS, TimesRows, Unfit
from .shared import RowRewriting
from .writes import Write, write_of, written

aten = torch.ops.aten
NEW = ("aten.new_zeros", "aten.new_ones", "aten.new_full")
_FILLS = ("aten.zeros", "aten.ones", "aten.full", "aten.expand", *NEW)
"""Ops whose rows are all the same, wherever they are."""
_FIX = (
    "compute each row by itself, and add or write rows by index_add, index_put or scatter; self-loops can be added to "
    "the edges before the step (add_self_loops=False, torch_geometric.transforms.AddRemainingSelfLoops)"
)
_OTHERS = 7
"""How many rows and samples other values have where ops are tried."""


@dataclass(frozen=True)
class Piece:
    """Rows of one axis.  count: how many.  kept: a mask [count] of those that count, None for all."""

    count: sympy.Symbol
    kept: Node | None = None


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
                made = size_of(graph, source, dim)
        else:
            one = self.of(count)
            with graph.inserting_after(one):
                made = multiple(graph, one, times)
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
        if self.kept is None or not facts.is_differentiable(twin.meta["val"]) or twin in self.cut:
            return twin
        others = self.others(twin.meta["val"].ndim, dim)
        fill = 0.3 + 0.07 * len(self.cut)
        found = self.made(twin.next, node, aten.masked_fill.Scalar, twin, others, fill)
        self.cut.add(found)
        self.inside.append(found)
        return found

    def others(self, ndim: int, dim: int) -> Node:
        """The rows that are not picked, in dim `dim` of so many."""
        if (ndim, dim) not in self.left_out:
            assert self.kept is not None
            last = facts.placeholders(self.gm)[-1]
            first = (last if self.kept.op == "placeholder" else self.kept).next  # in front of all that needs it
            shape = [-1 if d == dim else 1 for d in range(ndim)]
            others = self.made(first, self.kept, aten.logical_not.default, self.kept)
            self.left_out[ndim, dim] = self.made(first, self.kept, aten.reshape.default, others, shape)
            self.entries[self.left_out[ndim, dim]] = dim
        return self.left_out[ndim, dim]

    def made(self, place: Node, node: Node, target: Any, *args: Any) -> Node:
        """A new node in front of another one, for the line of `node`."""
        with self.gm.graph.inserting_before(place):
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
    known: c of sizes of c rows.
    entered: the nodes at which its rows begin.  missed: those that read its rows in another way than one by one.
    reason: why they are not treated one by one.
    """

    def __init__(
        self, gm: GraphModule, symbols: tuple[sympy.Symbol, ...], pieces: Sequence[Piece], sizes: Sizes
    ) -> None:
        self.gm, self.symbols, self.sizes = gm, symbols, sizes
        self.total = sympy.Add(*symbols)
        self.parts = [Part(gm, piece) for piece in pieces]
        self.known: dict[sympy.Expr, sympy.Expr] = {}
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
        if size not in self.known:
            numerator, denominator = sympy.cancel(size / self.total).as_numer_denom()
            self.known[size] = numerator if size.free_symbols and denominator == 1 else sympy.Integer(0)
        return self.known[size]

    def has_rows(self, node: Node) -> bool:
        """Whether a value has this axis, by its shape."""
        return any(self.times(size) != 0 for t in facts.tensors(node.meta.get("val")) for size in facts.shape(t))

    def enter(self, node: Node, values: Sequence[Node], dim: int) -> None:
        """A node is these values, one behind the other along a dim."""
        self.nodes.add(node)
        self.entered.append(node)
        for part, value in zip(self.parts, values, strict=True):
            twin = part.made(node, node, aten.alias.default, value)
            part.entries[twin] = dim
            part.twins[node] = part.without_others(node, twin, dim)

    def reads(self, node: Node) -> bool:
        """Whether a node may be computed row by row, by its inputs; if it writes rows elsewhere, that is noted."""
        if not all(self.provided(n) for n in node.all_input_nodes):
            return False
        write = write_of(node, self.nodes.__contains__)
        if write is None:
            return self.has_rows(node) and not any(
                n in symbolic_values(node, s) for s in self.total.free_symbols for n in self.numbers(node)
            )
        if all(self.place(n) == dim for n, dim in write.places.items()) and not self.has_rows(write.onto):
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
        given = any(isinstance(v, Tensor) and facts.is_differentiable(v) for v in others)
        return (given and op_name(node) not in NEW) or (node.target is operator.getitem and node.args[0] in self.halves)

    def cut(self, node: Node, n: Node) -> bool:
        """Rows of a value that are not picked have no part in what follows, nor in derivatives."""
        place, value = self.place(n), n.meta["val"]
        if all(part.kept is None for part in self.parts) or not isinstance(value, Tensor):
            return True
        if place < 0 or not facts.is_differentiable(value):
            return not facts.is_differentiable(value)
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
        if draws(node):
            why = (
                "it draws at random for rows of several axes, or that a mask picks: taken apart, these are other draws"
            )
        return not_shown(node, why, _FIX)

    def written(self, node: Node, write: Write) -> Node:
        """The same of each part; pointers that are numbers in the code come last, unless it is the last that stands."""
        in_order = write.reduce == "last"
        parts = sorted(self.parts, key=lambda part: not in_order and _is_plain(part.twins[write.index]))
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
