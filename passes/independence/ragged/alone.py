"""Structure as a sample alone has it: what masks and pointers say of a sample's rows must be what they say there.

Structure is computed from ids, offsets, places and numbers in the code.  Where a sample is alone, its number is 0, and
so is the place of its first row.  So each value v is followed as what it is in its part of a batch:

    v = v_alone + Σ_axis k[axis] start[axis]        start: the place of its first row; of the samples, its number

Masks need k = 0, and pointers k = 1 for the axis that they point to.  Differences and comparisons of places take
`start` away; ops that no rule here knows end the proof.  What holds only if a sample's rows follow one another is a
condition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.order import is_reshaped, is_same, itself
from psg_fx.graph.same_op import alike, draws
from psg_fx.program.arguments.conditions import ROW_AXES
from psg_fx.source import locate

from ..arguments import bound, is_symbolic, op_name, symbolic_values
from ..refused import not_shown
from ..table import find
from ..values import NUMBERING, Op, Result
from .links import READS, WRITES, Link, pointing
from .parts import Part, between, holds, ignores, needed_order, number

_FILLS = {
    f"{new}{name}{like}" for name in ("full", "ones", "zeros") for new in ("", "new_") for like in ("", "_like")
} | {"scalar_tensor"}
_BY_ELEMENT = {"masked_fill", "where", "__and__", "__or__", "__xor__"}
_CUTS = {"select", "slice", "unbind", "split", "split_with_sizes", "chunk"}
_COMPARED = {"eq", "ne", "lt", "le", "gt", "ge"}
_SEARCHED = {"searchsorted": ("sorted_sequence", "self"), "bucketize": ("boundaries", "self")}
_VALUES = ("self", "src", "source", "value", "values")
_MOST = 2**20
"""Numbers that may be added to places: nothing wraps around, or is rounded."""
_FIX = (
    "compare ids with ids and places with places: ids[:, None] == ids[None, :], arange(R)[:, None] >= arange(R); the "
    "place of a row within its sample, and the number of its rows, are inputs"
)


class Parts:
    """What is known of the parts of structure, and of what is made of numbers in the code (`plain`)."""

    def __init__(self, gm: GraphModule, plain: Set[Node]) -> None:
        info = facts.graph_facts(gm)
        self.gm, self.plain, self.batch, self.counts = gm, plain, info.batch, {info.batch, *info.rows}
        self.found: dict[Node, Part] = {}
        self.offsets: dict[Node, sympy.Symbol] = {}
        given = [n for n in facts.placeholders(gm) if facts.input_spec(n).kind in ("input", "target")]
        for symbol, axis in zip(info.rows, ROW_AXES.of(gm), strict=True):
            if axis.tensor is not None and axis.rows.offsets:
                self.offsets[given[axis.tensor]] = symbol
            elif axis.tensor is not None:
                self.found[given[axis.tensor]] = Part({self.batch: 1}, 0)
        self.found |= {n: Part({s: 1}) for n, s in self.offsets.items() if self.counted(n) == [self.batch]}
        numbers = alike(gm)
        ids = {numbers[n] for spec, n in facts.returned(gm) if spec.kind == "ids" and n is not None}
        self.ids = {n for n in gm.graph.nodes if numbers[n] in ids}

    def counted(self, node: Node) -> list[Any] | None:
        """The dims of rows and samples, by what counts them; None if one holds anything beside them."""
        sizes = [s for s in facts.shape(node.meta["val"]) if s.free_symbols & self.counts]
        return sizes if all(s in self.counts for s in sizes) else None

    def note(self, op: Op) -> None:
        """Follow the value of an op."""
        if not isinstance(op.node.meta.get("val"), torch.Tensor) or self.counted(op.node) is None:
            return
        found = Part({self.batch: 1}, 0) if op.node in self.ids else self.made(op)
        if found is not None and not draws(op.node):
            self.found[op.node] = found

    def made(self, op: Op) -> Part | None:
        """The part of what an op gives; None if it is not known."""
        node, name = op.node, op.name.removeprefix("aten.")
        if node.target is operator.getitem:
            name, node = op_name(node.args[0]).removeprefix("aten."), node.args[0]  # type: ignore[arg-type,assignment]
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        parts = [self.found.get(n) for n in inputs]
        if (made := self.of_sizes(op, name)) is not None:
            return made
        if node.target in READS or node.target in WRITES:
            return self.joined(op)
        if name in _SEARCHED:
            return self.searched(op, *(op.args[key] for key in _SEARCHED[name]))
        sized = any(is_symbolic(n, count) for n in node.all_input_nodes for count in self.counts)
        if len(inputs) == 1 and (viewed := self.viewed(op, name, inputs[0], sized)) is not None:
            return viewed
        if sized:
            return None
        if name in ("add", "sub", "rsub") and not all(part is not None and not part.starts for part in parts):
            return self.summed(op, name)
        known = [part for part in parts if part is not None]
        return self.of_parts(op, name, inputs, known) if len(known) == len(parts) else None

    def of_sizes(self, op: Op, name: str) -> Part | None:
        """Values made from their sizes: fills, places, a diagonal."""
        sizes = facts.shape(op.node.meta["val"])
        if name in _FILLS:
            return None if any(symbolic_values(op.node, count) for count in self.counts) else Part({})
        if name == "eye" and sizes[0] == sizes[1]:
            return Part({})
        start, step = op.raw("start", 0), op.raw("step", 1)
        if name != "arange" or sizes[0] not in self.counts or not type(start) is type(step) is int:
            return None
        return Part({sizes[0]: 1}, start) if step == 1 and abs(start) <= _MOST and holds(op.node) else None

    def viewed(self, op: Op, name: str, source: Node, sized: bool) -> Part | None:
        """The same values in another shape or dtype, repeated, or cut along a dim of other things."""
        part, after = self.found.get(source), self.counted(op.node)
        if name == "slice" and after == [self.batch] and (axis := self.offsets.get(itself(source))) is not None:
            return Part({axis: 1})  # of offsets with an end
        if part is None:
            return None
        if is_same(op.node):
            kept = not part.starts or holds(op.node) or op.node.meta["val"].dtype == source.meta["val"].dtype
        elif is_reshaped(op.node) or (name == "slice" and sized):
            before, now = ([s for s in facts.shape(n.meta["val"]) if s != 1] for n in (source, op.node))
            kept = before == now
        elif name in _CUTS:
            kept = not sized and self.counted(source) == after
        else:
            kept = name in ("permute", "transpose", "t", "expand", "repeat")
        return part if kept else None

    def of_parts(self, op: Op, name: str, inputs: Sequence[Node], parts: Sequence[Part]) -> Part | None:
        """Comparisons and choices of places; anything of what is the same alone."""
        ordered = needed_order(parts)
        if name in ("cat", "stack"):
            return self.beside(op, inputs, parts)
        if any(part.starts for part in parts):
            chosen = name == "where" and not parts[0].starts
            return (
                self.compared(op, name, inputs[chosen:], parts[chosen:], ordered) if len(parts) == 2 + chosen else None
            )
        if torch.Tag.pointwise in getattr(op.node.target, "tags", ()) or name in _BY_ELEMENT:
            return Part({}, None, ordered, self.between(op, name))
        if name in ("tril", "triu"):
            t, s = facts.shape(inputs[0].meta["val"])[-2:]
            if t != s and {t, s} & self.counts:
                return None
            far = (
                t in self.counts
                and t not in self.offsets.values()
                and op.raw("diagonal", 0) not in ((0, -1) if name == "tril" else (0, 1))
            )
            return Part({}, None, ordered | ({t} if far else set()), None if parts[0].between else parts[0].between)
        counted = [self.counted(n) for n in (op.node, *inputs)]
        own = len(inputs) == 1 and [len(c or ()) for c in counted] == [1, 2] and ignores(name, parts[0])
        own = own and (op.node.meta["val"].dtype == torch.bool or holds(op.node))
        return Part({}, None, ordered) if own or all(c == [] for c in counted) else None

    def between(self, op: Op, name: str) -> bool | None:
        """What a function of masks with an entry for each pair, and of numbers, has for pairs of two samples."""
        pairs = self.counted(op.node)
        if len(pairs or ()) != 2:
            return None

        def entry(given: Any) -> bool | None:
            part = self.found.get(given) if isinstance(given, Node) else None
            return number(given) if part is None else part.between if self.counted(given) == pairs else None

        operands = [entry(op.args[key]) for key in ("self", "other") if key in op.args]
        return between(name, op.node.meta["val"].dtype, operands)

    def beside(self, op: Op, inputs: Sequence[Node], parts: Sequence[Part]) -> Part | None:
        """Values beside one another, along a dim of other things."""
        if not holds(op.node) or any(self.counted(n) != self.counted(op.node) for n in inputs):
            return None
        first, same = parts[0], len({part.plus for part in parts}) == 1
        ordered = needed_order(parts) | (frozenset() if same else self.rows(first))
        alike = all(part.starts == first.starts for part in parts)
        return Part(first.starts, first.plus if same else None, ordered) if alike else None

    def compared(
        self, op: Op, name: str, inputs: Sequence[Node], parts: Sequence[Part], ordered: frozenset[sympy.Symbol]
    ) -> Part | None:  # fmt: skip
        """Which of two places is larger, or one of them; if nothing is added to them, in whatever order rows lie."""
        a, b = parts
        held = all(map(holds, inputs)) or len({n.meta["val"].dtype for n in inputs}) == 1
        if a.starts != b.starts or not held:
            return None
        same = a.plus is not None and a.plus == b.plus
        ordered |= frozenset() if same else self.rows(a)
        if name in ("where", "maximum", "minimum"):
            return Part(a.starts, a.plus if same else None, ordered)
        if name not in _COMPARED or a.plus is None or b.plus is None:
            return None
        pairs = [len(self.counted(n) or ()) for n in (*inputs, op.node)] == [1, 1, 2]
        apart = {"eq": False, "ne": True}.get(name) if same and pairs else None
        return Part({}, None, ordered, apart)

    def summed(self, op: Op, name: str) -> Part | None:
        """a ± b, of which one may be a number, or data that starts are added to."""
        a, b = (self.operand(op, op.args[key]) for key in ("self", "other"))
        if a is None or b is None or op.raw("alpha", 1) != 1 or not holds(op.node):
            return None
        a, b = (b, a) if name == "rsub" else (a, b)
        sign = 1 if name == "add" else -1
        both = {axis: a.starts.get(axis, 0) + sign * b.starts.get(axis, 0) for axis in {*a.starts, *b.starts}}
        starts, ordered = {axis: k for axis, k in both.items() if k}, needed_order((a, b))
        exact = a.plus is not None and b.plus is not None
        if exact and (not b.starts or (not a.starts and sign == 1)):
            plus = (a.plus or 0) + sign * (b.plus or 0)
            return Part(starts, plus, ordered) if abs(plus) <= _MOST else None
        if not exact and op.node.meta["val"].dtype not in NUMBERING:
            return None
        return Part(starts, None, ordered | self.rows(a) | self.rows(b))

    def operand(self, op: Op, given: Any) -> Part | None:
        """An operand of a sum; of a number, `plus` is its value."""
        if not isinstance(given, Node):
            return Part({}, int(given)) if abs(given) <= _MOST and given == int(given) else None
        is_data = not op.known[given].structure and given not in self.plain
        return self.found.get(given) or (Part({}) if is_data and given.meta["val"].dtype in NUMBERING else None)

    def joined(self, op: Op) -> Part | None:
        """Rows that are read or written by pointers to those of their own sample: its ids and places, or what a link
        checks.
        """
        found = pointing(op)
        if found is None or not found[1]:
            return None
        link, written = found[1][0], op.node.target in WRITES
        by = self.found.get(link.by)
        own = not op.known[link.by].structure and link.by not in self.plain
        if not own and (by is None or by.starts != {link.other: 1} or by.plus != 0):
            return None
        values = [self.found.get(op.args[key]) for key in _VALUES if isinstance(op.args.get(key), Node)]
        if not values or any(part is None or (written and part.starts) for part in values):
            return None
        parts = [part for part in values if part is not None]
        return replace(parts[0], ordered=needed_order(parts), between=None if written else parts[0].between)

    def searched(self, op: Op, begins: Node, places: Any) -> Part | None:
        """How many samples begin at a place or before it, the id of its row + 1; how many end there, the id."""
        begins, part, plus = itself(begins), self.found.get(places) if isinstance(places, Node) else None, 1
        if op_name(begins) == "aten.slice" and self.counted(begins) == [self.batch]:
            plus -= {None: 0, 0: 0, 1: 1}.get(bound(begins)["start"], 2)
            begins = itself(begins.args[0])
        right = op.raw("right", False) is True or op.raw("side") == "right"
        if part is None or plus < 0 or begins not in self.offsets or not right:
            return None
        return Part({self.batch: 1}, plus) if part.starts == {self.offsets[begins]: 1} and part.plus == 0 else None

    def is_value(self, node: Node) -> bool:
        """Whether it has, for each sample or each row, what that has alone, as a count of rows does."""
        found, counted = self.found.get(node), self.counted(node)
        alike = found is not None and not found.starts and not found.ordered
        return alike and counted is not None and len(counted) == 1

    def rows(self, part: Part) -> frozenset[sympy.Symbol]:
        """The axes of rows whose first place is in a value, and that are not known to be in order."""
        return frozenset(part.starts) - {self.batch, *self.offsets.values()}

    def show(
        self, node: Node, n: Node, to: sympy.Symbol | None, known: Mapping[Node, Result]
    ) -> Iterable[sympy.Symbol]:
        """The axes whose rows must be in order for n to mask, or point `to` an axis, as it does for a sample alone."""
        found = self.found.get(n)
        if found is not None and found.starts == ({} if to is None else {to: 1}):
            return found.ordered if to is None or found.plus == 0 else found.ordered | self.rows(found)
        above = facts.ancestors([n], through=lambda m: known[m].structure or m in self.plain)
        at = next((m for m in self.gm.graph.nodes if m in above and m not in self.found and self.may_lose(m, known)), n)
        raise not_shown(
            node, f"what %{n.name} says of a sample's rows may not be what it says of that sample alone: {op_name(at)} "
            f"computes with numbers of rows or samples ({locate(at)})", _FIX,
        )  # fmt: skip

    def may_lose(self, node: Node, known: Mapping[Node, Result]) -> bool:
        """Whether it is an op by which it may be lost what a sample alone has."""
        value = node.meta.get("val")
        return node.op == "call_function" and isinstance(value, torch.Tensor) and (
            known[node].structure or node in self.plain
        )  # fmt: skip


def show_structure(
    parts: Parts, known: Mapping[Node, Result], links: Sequence[Link], logged: Set[Node]
) -> list[Link]:  # fmt: skip
    """Refuse an op that nothing shows to have the masks and pointers of a sample alone.  Returns axes whose rows must
    be in the order of their samples, as links.  logged: nodes of which no loss is made, such as the ids themselves.
    """
    met = [(node, n, None) for node in parts.gm.graph.nodes if node not in logged for n in _meets(node, known)]
    met += [(link.node, link.by, link.other) for link in links if link.kind == "pointer" and known[link.by].structure]
    ordered: dict[sympy.Symbol, Link] = {}
    for (n, to), node in {(n, to): node for node, n, to in reversed(met)}.items():
        for count in parts.show(node, n, to, known):
            ordered.setdefault(count, Link("order", node, n, 0, count, count))
    return list(ordered.values())


def _meets(node: Node, known: Mapping[Node, Result]) -> Iterator[Node]:
    """The structure that an op with values of samples reads, other than for its shape or to point."""
    rule = find(node.target)
    if node.op != "call_function" or known[node].structure or rule is None or rule.shapes_only:
        return
    if node.target not in READS and node.target not in WRITES:
        yield from (n for n in node.all_input_nodes if known[n].structure and not known[n].index)


__all__ = ["Parts", "show_structure"]
