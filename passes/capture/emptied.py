"""A graph as it is where some masks pick nothing: what they read has no rows, and what they write leaves all as it was.

Each value is followed from the masks on: it has no rows, is zero everywhere, or true everywhere.  What is computed of
all rows and dropped afterwards (`torch.where(m, f(x), out)`) is nothing if f is finite everywhere: else its derivative
times zero is not zero.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.finite import stays_finite
from psg_fx.graph.history import copy_graph
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.nodes import filled_with, is_detach, is_zeros
from psg_fx.graph.same_op import alike, computation

from ..independence.arguments import bound, op_name

aten = torch.ops.aten
LISTING = ("aten.nonzero", "aten.nonzero_numpy", "aten.where", "aten.argwhere")
PICKS = ("aten.index", "aten._unsafe_index", "aten.masked_select")
_PUTS = ("aten.index_put", "aten._unsafe_index_put")
_PUTS_BY_NUMBER = ("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.scatter", "aten.scatter_add")
_NOT = ("aten.bitwise_not", "aten.logical_not")
_AND = ("aten.bitwise_and", "aten.logical_and", "aten.__and__")
_KEEP_ZERO = (
    "aten._to_copy", "aten.clone", "aten.reshape", "aten.neg", "aten.sum", "aten.mean", "aten.any", "aten.cumsum",
)  # fmt: skip
_COMPARISONS = {f"aten.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_OR = ("aten.bitwise_or", "aten.logical_or", "aten.__or__")


class Emptied:
    """A copy of a graph, as it is if these masks pick nothing.

    masks: nodes that say of each place whether it is picked, `m != 0`; of all places but those of m, `m == 0`.
    What changes nothing is left out, also if there are no masks.  no_rows, zero, ones: nodes whose values then have no
    elements, are all zero, or all true.  equal: nodes whose values are then one number.
    """

    def __init__(self, gm: GraphModule, masks: Sequence[Node], zeros: Sequence[Node] = ()) -> None:
        """zeros: constants that are all zero."""
        self.gm = copy_graph(gm)
        self.of = dict(zip(gm.graph.nodes, self.gm.graph.nodes, strict=True))
        self.zero, self.ones, self.no_rows = {self.of[node] for node in zeros}, set[Node](), set[Node]()
        self.equal: dict[Node, Any] = {}
        self._numbers_of_rows: set[Any] = set()
        inputs = [t for node in facts.placeholders(gm) for t in facts.tensors(node.meta.get("val"))]
        self._sizes = {s for t in inputs for size in facts.shape(t) for s in size.free_symbols}
        numbers = alike(self.gm)
        known = [pair for mask in masks for pair in self._said_by(mask)]
        zero, ones = ({numbers[n] for n, value in known if value is each} for each in (False, True))
        equal = {numbers[n.all_input_nodes[0]]: n.args[1] for n, value in known if _says_equal(n, value)}
        found: dict[Any, Node] = {}  # what becomes of each computation: with some masks empty, more are the same
        for node in list(self.gm.graph.nodes):
            key = computation(node)
            kept = found.get(key) if key is not None else None
            if numbers[node] in equal:
                self.equal[node] = equal[numbers[node]]
            if numbers[node] in zero | ones:
                (self.zero if numbers[node] in zero else self.ones).add(node)
            elif kept is None and node.op == "call_function":
                kept = self._kept(node)
            if kept is not None:
                node.replace_all_uses_with(kept)
            found[key] = kept or node

    def depends(self, node: Node) -> bool:
        """Whether a node of the graph itself is computed from rows that a mask picks."""
        return not self.no_rows.isdisjoint(facts.ancestors([self.of[node]]))

    def _said_by(self, mask: Node) -> Iterator[tuple[Node, bool]]:
        """What is zero, or true, everywhere: the comparison, what it compares, and what that is the opposite of."""
        node, value = self.of[mask], False
        yield node, value
        value = node.target is aten.eq.Scalar
        node = node.all_input_nodes[0]
        while not value or _is_bool(node):
            yield node, value
            if op_name(node) not in _NOT or not _is_bool(node.all_input_nodes[0]):
                break
            node, value = node.all_input_nodes[0], not value

    def _kept(self, node: Node) -> Node | None:
        """The operand that a node is; for others, note what they are."""
        name, value = op_name(node), node.meta.get("val")
        kept = self._left_alone(node, name)
        if isinstance(kept, Node) and _are_of_one_kind(kept.meta["val"], value):
            return kept
        first = node.all_input_nodes[0] if node.all_input_nodes else node
        if (name in LISTING and first in self.zero) or (name in PICKS and self._picks_nothing(node)):
            self.no_rows.add(node)
            for t in facts.tensors(value):
                self._numbers_of_rows |= {s for size in facts.shape(t) for s in size.free_symbols} - self._sizes
        elif any(map(self._has_no_rows, facts.tensors(value))):
            self.no_rows.add(node)
        elif first in self.equal and (outcome := self._compared(node, name, first)) is not None:
            (self.ones if outcome else self.zero).add(node)
        elif self._is_zero(node, name, first):
            self.zero.add(node)
        elif self._is_true(node, name, first):
            self.ones.add(node)
        return None

    def _compared(self, node: Node, name: str, first: Node) -> bool | None:
        """What a comparison says of a value that is one number everywhere; None for other ops."""
        if is_view(node) or name in ("aten.clone", "aten.reshape"):
            self.equal[node] = self.equal[first]
        number = node.args[1] if len(node.args) == 2 else None
        if name not in _COMPARISONS or not isinstance(number, (int, float)):
            return None
        return bool(_COMPARISONS[name](self.equal[first], number))

    def _is_true(self, node: Node, name: str, first: Node) -> bool:
        if name in _OR:
            return _is_bool(node) and not self.ones.isdisjoint(node.all_input_nodes)
        if first in self.zero:
            return (name in _NOT and _is_bool(first)) or (name == "aten.eq" and node.args[1:] == (0,))
        return first in self.ones and is_view(node)

    def _is_zero(self, node: Node, name: str, first: Node) -> bool:
        if name in _AND:
            return not self.zero.isdisjoint(node.all_input_nodes)
        if name == "aten.mul":
            if any(_is_number_zero(n) for n in node.args):
                return self._is_harmless(first)
            return any(n in self.zero and self._is_harmless(_other(node, n)) for n in node.all_input_nodes)
        if name == "aten.div":
            return first in self.zero and self._is_never_zero(bound(node)["other"])
        if is_zeros(node):
            return True
        if first in self.zero:
            return is_view(node) or name in _KEEP_ZERO
        return (first in self.no_rows and name == "aten.sum") or (first in self.ones and name in _NOT)

    def _is_never_zero(self, divisor: Any) -> bool:
        """Whether what is zero stays so, divided by it: numbers, and what is added to zero, or no less than them."""
        if not isinstance(divisor, Node):
            return not _is_number_zero(divisor)
        name, given = op_name(divisor), bound(divisor) if divisor.op == "call_function" else {}
        if name in ("aten._to_copy", "aten.clone"):
            return self._is_never_zero(given["self"])
        if name in ("aten.clamp", "aten.clamp_min") and isinstance(given["min"], (int, float)):
            return given["min"] > 0
        if name == "aten.add":
            return given["self"] in self.zero and not isinstance(given["other"], Node) and given["other"] != 0
        number = filled_with(divisor)
        return isinstance(number, (int, float)) and number != 0

    def _is_harmless(self, value: Any, kept: Any = None) -> bool:
        """Whether a value that counts nothing is finite if what is kept is, and its derivatives are."""
        if not isinstance(value, Node):
            return True
        above = facts.ancestors([value]) | {value}
        if isinstance(kept, Node):
            above -= facts.ancestors([kept]) | {kept}
        return self.no_rows.isdisjoint(above) and all(map(stays_finite, above))

    def _has_no_rows(self, value: torch.Tensor) -> bool:
        none = dict.fromkeys(self._numbers_of_rows, 0)
        return bool(none) and any(size.subs(none) == 0 for size in facts.shape(value))

    def _picks_nothing(self, node: Node) -> bool:
        """Whether an op reads or writes by a mask that picks nothing, or by numbers that are none."""
        given = bound(node)
        picks = given["indices"] if "indices" in given else [given["mask"]]
        return any(n is not None and (n in self.no_rows or (n in self.zero and _is_bool(n))) for n in picks)

    def _left_alone(self, node: Node, name: str) -> Any:
        """The operand that a node is, if it has its shape and dtype."""
        if name in _PUTS:
            return bound(node)["self"] if self._picks_nothing(node) else None
        if name in _PUTS_BY_NUMBER:
            return bound(node)["self"] if bound(node)["index"] in self.no_rows else None
        if name in _INTO_VIEWS:
            return bound(node)["self"] if _puts_back(node, name) else None
        given = bound(node) if name in _DENSE else {}
        if name == "aten.masked_fill":
            return given["self"] if given["mask"] in self.zero and self._is_harmless(given["value"]) else None
        if name == "aten.masked_scatter":
            return given["self"] if given["mask"] in self.zero and given["source"] in self.no_rows else None
        if name in ("aten.expand", "aten.slice", "aten.clone"):
            return given["self"]
        if name == "aten.where" and "other" in given:
            for kept, dropped, known in (("other", "self", self.zero), ("self", "other", self.ones)):
                if given["condition"] in known and self._is_harmless(given[dropped], given[kept]):
                    return given[kept]
        if name == "aten.add" and _is_number_zero(given["other"]):
            return given["self"]
        if name == "aten.div" and given.get("rounding_mode") is None and _is_one(given["other"]):
            return given["self"]
        known = self.ones if name in _AND else self.zero
        if name in (*_AND, *_OR) or given.get("alpha") == 1:
            other = next((_other(node, n) for n in node.all_input_nodes if n in known), None)
            is_mask = isinstance(other, Node) and _is_bool(other)
            return other if is_mask or name not in _AND else None  # ids & True are the last bits of ids
        return None


_DENSE = (
    "aten.masked_fill", "aten.masked_scatter", "aten.expand", "aten.slice", "aten.clone", "aten.where", "aten.add",
    "aten.div",
)  # fmt: skip


_INTO_VIEWS = tuple(f"aten.{view}_scatter" for view in ("slice", "select", "diagonal", "as_strided"))


def _puts_back(node: Node, name: str) -> bool:
    """Whether a part of a value, or all of it, is replaced by itself: `x[1:][m] = y`, of a mask that picks nothing."""
    given = bound(node)
    view = given.pop("src")
    if view is given["self"]:
        return name == "aten.slice_scatter"
    return op_name(view) == name.removesuffix("_scatter") and bound(view) == given


def _says_equal(node: Node, value: bool) -> bool:
    """Whether a comparison with a number, which comes out so everywhere, says that what it compares is that number."""
    says = (node.target is aten.ne.Scalar and not value) or (node.target is aten.eq.Scalar and value)
    return says and isinstance(node.args[0], Node) and not _is_bool(node.args[0])


def _is_number_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _is_one(value: Any) -> bool:
    return value == 1 if isinstance(value, (int, float)) else filled_with(value) == 1


def _other(node: Node, one: Node) -> Any:
    """The other one of two operands."""
    given = bound(node)
    return given["other"] if given["self"] is one else given["self"]


def said(mask: Node) -> Node:
    """The comparison with zero that says where a mask picks."""
    while is_detach(mask) or mask.target is aten.clone.default:
        mask = mask.all_input_nodes[0]
    return mask


def _are_of_one_kind(one: Any, other: Any) -> bool:
    both = one, other
    if not all(isinstance(value, torch.Tensor) for value in both):
        return False
    return facts.shape(one) == facts.shape(other) and one.dtype == other.dtype


def _is_bool(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) is torch.bool
