"""Inputs that point, such as the edges of a graph: places of rows, which a sample alone numbers otherwise.

What an input holds is not said beforehand: a table of integers along an axis may hold edges, kinds of edges, or both.
So entries of inputs are places where an op reads or writes rows by them, and are followed as ids are (`alone.py`) from
the input on: they may point, and be compared with and subtracted from one another.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.order import is_reshaped, is_same

from ..arguments import bound, op_name
from ..refused import mixed
from ..table import find
from ..values import Op, ProvePart, Result, tensors
from .alone import Parts
from .links import Link
from .parts import Part

_VIEWS = {"select", "slice", "unbind", "split", "split_with_sizes", "chunk", "permute", "transpose", "t", "flip"}
_NO_PLACE = {"lt": 0, "ge": 0, "le": -1, "gt": -1, "eq": -1, "ne": -1}
"""The largest number with which a comparison says the same of all places, which are not negative."""
_CHOICES = (
    "where", "maximum", "minimum", "clamp", "clamp_min", "expand", "stack", "cat", "max", "min", "amax", "amin",
)  # fmt: skip
_VALUES = ("self", "onto", "src", "source", "value", "values")
_FIX = (
    "give what is a value of a row as an input of its own; numbers of rows may point, and be compared with and "
    "subtracted from one another: e[0] < e[1], e[0] - e[1]"
)


def show_pointers(
    parts: Parts, known: dict[Node, Result], links: Sequence[Link], logged: Set[Node], prove: ProvePart
) -> list[Link]:  # fmt: skip
    """Refuse an op that computes with numbers of rows that an input points to, unless it has what a sample alone has.

    Returns axes whose rows must be in the order of their samples, as links.
    """
    given = [link for link in links if link.kind == "pointer" and not known[link.by].structure]
    if not given:
        return []
    found = Pointers(parts, known, given)
    for node in parts.gm.graph.nodes:
        if node.op == "call_function" and node not in logged:
            found.visit(Op(node, parts.batch, known, prove))
    return list(found.ordered.values())


class Pointers:
    """What is known of the entries of inputs by which rows are read or written, and of what is made of them.

    entries: of views of inputs, the entries that they hold (`entries_of_inputs`).  about: values that are such numbers.
    """

    def __init__(self, parts: Parts, known: Mapping[Node, Result], links: Sequence[Link]) -> None:
        self.parts, self.known = copy.copy(parts), known
        self.parts.found = dict(parts.found)
        self.entries = entries_of_inputs(parts.gm.graph.nodes, known)
        self.links = {link.node: link for link in links}
        self.ordered: dict[sympy.Symbol, Link] = {}
        axes: dict[tuple[Node, int], sympy.Symbol] = {}
        for link in links:
            axes |= {entry: link.other for n in self._chosen(link.by) for entry in self.entries.get(n, ())}
        self.about = {n for n, held in self.entries.items() if not axes.keys().isdisjoint(held)}
        for n in self.about:
            to = {axes.get(entry) for entry in self.entries[n]}
            if len(to) == 1 and isinstance(n.meta["val"], Tensor):
                self.parts.found[n] = Part({to.pop(): 1}, 0)

    def _chosen(self, pointer: Node) -> set[Node]:
        """A pointer, and the values that its entries are made of one by one: those are places, too."""
        found, new = {pointer}, [pointer]
        while new:
            node = new.pop()
            passed = node not in self.entries and _passes_on(node)
            above = {n for n in (node.all_input_nodes if passed else []) if _is_number(n)} - found
            new += above
            found |= above
        return found

    def visit(self, op: Op) -> None:
        """Follow an op of places."""
        node, rule = op.node, find(op.node.target)
        met = [n for n in node.all_input_nodes if n in self.about]
        value = node.meta.get("val")
        if not met or node in self.entries or not tensors(value) or (rule and rule.shapes_only):
            return
        link = self.links.get(node)
        if link is not None:
            if link.by in self.about and link.by not in self.entries:
                self.points(op, link)
            if not any(op.args.get(key) in met for key in _VALUES):
                return
        for n in node.all_input_nodes:
            if not self.known[n].structure and n not in self.parts.plain and n not in self.about:
                self.parts.found.setdefault(n, Part({}))  # data of each row
        part = self.made(op) if isinstance(value, Tensor) else None
        if part is None:
            raise self.refused(node, met[0])
        if part.starts:
            self.about.add(node)
            self.parts.found[node] = part
        else:
            self.order(node, part.ordered)

    def made(self, op: Op) -> Part | None:
        """The part of what an op gives; None if it is not known."""
        name = op.name.removeprefix("aten.")
        other = op.args.get("other")
        if name in _NO_PLACE and isinstance(other, (int, float)):
            part = self.parts.found.get(op.args["self"])
            return Part({}) if part is not None and part.plus == 0 and other <= _NO_PLACE[name] else None
        if name in ("clamp", "clamp_min") and op.raw("min", 0) == 0 and op.raw("max") is None:
            return self.parts.found.get(op.args["self"])
        return self.parts.made(op)

    def points(self, op: Op, link: Link) -> None:
        """What is made of places points to the axis of these, as they do."""
        part = self.parts.found.get(link.by)
        if part is None or part.starts != {link.other: 1}:
            raise self.refused(op.node, link.by)
        self.order(op.node, part.ordered if part.plus == 0 else part.ordered | self.parts.rows(part))

    def order(self, node: Node, axes: Set[sympy.Symbol]) -> None:
        for count in axes:
            self.ordered.setdefault(count, Link("order", node, node, 0, count, count))

    def refused(self, node: Node, by: Node) -> Exception:
        return mixed(node, f"it computes with %{by.name}, numbers of rows that an input points to: one sample alone "
                     "has others", _FIX)  # fmt: skip


def _passes_on(node: Node) -> bool:
    """Whether each entry of what an op gives is some entry of what it is given, or a function of one."""
    name = op_name(node).removeprefix("aten.")
    if name in _CHOICES or name in _VIEWS or is_same(node) or is_reshaped(node) or node.target is operator.getitem:
        return True
    alone = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return len(alone) == 1 and (torch.Tag.pointwise in getattr(node.target, "tags", ()) or name.startswith("__"))


def _is_number(node: Node) -> bool:
    return any(t.dtype != torch.bool for t in facts.tensors(node.meta.get("val")))


def entries_of_inputs(nodes: Any, known: Mapping[Node, Result]) -> dict[Node, set[tuple[Node, int]]]:
    """Of inputs with rows, and their views: the input, and the numbers of a row's entries that it has."""
    found: dict[Node, tuple[Node, Any]] = {}
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor) and _is_given(node, known):
            shape = _of_one_row(value)
            found[node] = node, torch.arange(torch.Size(shape).numel()).reshape(shape)
        elif node.op == "call_function" and node.args and isinstance(node.args[0], Node) and node.args[0] in found:
            origin, held = found[node.args[0]]
            if (seen := _seen(node, held)) is not None:
                found[node] = origin, seen
    return {
        n: {(origin, int(i)) for t in facts.tensors(held) for i in t.flatten()} for n, (origin, held) in found.items()
    }


def _is_given(node: Node, known: Mapping[Node, Result]) -> bool:
    """Whether it is an input of numbers with a row for each sample, or with rows of samples, and no structure."""
    of_rows = isinstance(known[node].axes, SampleAxis) and not known[node].structure
    return of_rows and not node.meta["val"].is_complex() and facts.input_spec(node).kind in ("input", "target")


def _of_one_row(value: Tensor) -> list[int]:
    """The shape of a value with one row."""
    return [1 if size.free_symbols else int(size) for size in facts.shape(value)]


def _seen(node: Node, held: Any) -> Any:
    """The entries that a view holds, of those that its argument holds; None where it is no view, or one along rows."""
    if node.target is operator.getitem:
        return held[node.args[1]]
    if not isinstance(held, Tensor):
        return None
    value = node.meta["val"]
    if is_same(node):
        return held
    if is_reshaped(node) and isinstance(value, Tensor):
        shape = torch.Size(_of_one_row(value))
        return held.reshape(shape) if shape.numel() == held.numel() else None
    name = op_name(node).removeprefix("aten.")
    if name == "expand":
        return held.expand(_of_one_row(value))
    if name not in _VIEWS or len(node.all_input_nodes) > 1 or _cuts_rows(node, held):
        return None
    return node.target(held, *node.args[1:], **node.kwargs)  # type: ignore[operator]


def _cuts_rows(node: Node, held: Tensor) -> bool:
    """Whether a view is one along a dim of rows: of it not all that are there, or in another order."""
    given = bound(node)
    dims = given.get("dims", given.get("dim", ()))
    sizes = facts.shape(node.args[0].meta["val"])  # type: ignore[union-attr]
    if op_name(node) in ("aten.permute", "aten.transpose", "aten.t") or _is_all(node, sizes):
        return False
    return any(sizes[d].free_symbols for d in ([dims] if isinstance(dims, int) else dims))


def _is_all(node: Node, sizes: Sequence[Any]) -> bool:
    """Whether a slice is all of a value of these sizes: `e[:, 0]` is a column of one."""
    return op_name(node) == "aten.slice" and list(facts.shape(node.meta["val"])) == list(sizes)


__all__ = ["show_pointers"]
