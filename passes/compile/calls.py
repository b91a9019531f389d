"""calls: intervals of a graph that are alike (`psg_fx/graph/repeats.py`) as calls of one function, a subgraph."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.repeats import Item, Repeat, is_number, repeats, said, sizes_and_ops, tokens_of
from psg_fx.torch_private.graphs import module_without_code

invoke_subgraph = torch.ops.higher_order.invoke_subgraph
FEWEST = 16
"""Ops of an interval: of fewer, less is saved than is lost where kernels end at its borders."""


def written_once(gm: GraphModule, fewest: int = FEWEST) -> GraphModule:
    """The same function, in which what repeats is a subgraph that is called; the graph itself if nothing does."""
    first, items = sizes_and_ops(gm)
    found = [group for repeat in repeats(tokens_of(items), fewest) for group in _alike(repeat, items)]
    return _Rewriting(gm, first, items, found).result() if found else gm


@dataclass(frozen=True)
class Calls:
    """Intervals of items that are one function.

    operands: of each, the tensors that it reads, in the same order.  made: what the first one reads that is computed
    once more inside, in the order of computing: sizes, since a number that is known would be no operand; and
    views that are alike, which else would be made outside for each call.
    """

    starts: tuple[int, ...]
    length: int
    operands: tuple[tuple[Node, ...], ...]
    made: tuple[Node, ...]


def _alike(repeat: Repeat, items: Sequence[Item]) -> Iterator[Calls]:
    """The intervals, by which of their ops read which.

    No operand is another one, too: of two that are one tensor a compiler reads the first, in every call.
    """
    groups: dict[Any, list[tuple[int, list[Node]]]] = {}
    for start in repeat.starts:
        inside, outer = _wiring(items[start : start + repeat.length])
        groups.setdefault(inside, []).append((start, outer))
    for group in groups.values():
        if len(group) > 1:
            calls = _calls(group, repeat.length)
            apart = [one for one, read in zip(group, calls.operands, strict=True) if len(set(read)) == len(read)]
            if len(apart) > 1:
                yield calls if len(apart) == len(group) else _calls(apart, repeat.length)


def _wiring(items: Sequence[Item]) -> tuple[tuple[Any, ...], list[Node]]:
    """Of every value that the items read, its place among them, or the number of one from outside; and those that come
    from outside, in the order of reading.
    """
    place = _places(items)
    number: dict[Node, int] = {}
    inside: list[Any] = []
    outer: list[Node] = []

    def read(node: Node) -> None:
        inside.append(place[node] if node in place else number.setdefault(node, len(number)))
        if node not in place:
            outer.append(node)

    for item in items:
        map_arg((item[0].args, item[0].kwargs), read)
    return tuple(inside), outer


def _places(items: Sequence[Item]) -> dict[Node, tuple[int, int]]:
    return {node: (i, k) for i, item in enumerate(items) for k, node in enumerate(item)}


def _calls(intervals: Sequence[tuple[int, list[Node]]], length: int) -> Calls:
    starts, outer = zip(*intervals, strict=True)
    columns: dict[tuple[Node, ...], None] = {}
    made: dict[tuple[Node, ...], None] = {}

    def need(column: tuple[Node, ...]) -> None:
        if is_number(column[0]):
            column = column[:1] * len(starts)
        elif not _are_one_view(column):
            columns.setdefault(column)
            return
        if column not in made:
            for sources in zip(*(node.all_input_nodes for node in column), strict=True):
                need(sources)
            made[column] = None

    for column in zip(*outer, strict=True):
        need(column)
    operands = tuple(zip(*columns, strict=True)) or ((),) * len(starts)
    return Calls(starts, length, operands, tuple(column[0] for column in made))


def _are_one_view(column: Sequence[Node]) -> bool:
    """Whether the values are views, or parts of some, by one op of values of one kind: a function is compiled for the
    operands of its first call.
    """
    first = column[0]
    if first.target is operator.getitem:
        sources = [node.all_input_nodes[0] for node in column]
        return all(node.args[1:] == first.args[1:] for node in column) and _are_one_view(sources)
    if not is_view(first):
        return False
    kinds = {said((node,)) for node in column}
    return len(kinds) == 1 and first not in kinds


class _Rewriting:
    """The graph with calls in the place of intervals."""

    def __init__(self, gm: GraphModule, first: Sequence[Node], items: Sequence[Item], found: Sequence[Calls]) -> None:
        self._gm, self._first, self._items = gm, first, items
        self._at = {start: (k, calls) for k, calls in enumerate(found) for start in calls.starts}
        self._modules = dict(gm.named_children())
        self._graph = Graph()
        self._new: dict[Node, Node] = {}

    def result(self) -> GraphModule:
        results = {calls: self._results(calls) for _, calls in self._at.values()}
        functions = {calls: self._function(calls, results[calls]) for calls in results}
        for node in self._first:
            self._copy(node)
        i = 0
        while i < len(self._items):
            if i in self._at:
                number, calls = self._at[i]
                self._call(f"repeated_{number}", functions[calls], calls, results[calls], i)
                i += calls.length
            else:
                for node in self._items[i]:
                    self._copy(node)
                i += 1
        output = self._gm.graph.output_node()
        self._graph.output(map_arg(output.args[0], self._value)).meta = dict(output.meta)
        new = module_without_code(self._modules, self._graph, type(self._gm).__name__)
        new.meta = dict(self._gm.meta)
        return new

    def _copy(self, node: Node) -> None:
        self._new[node] = self._graph.node_copy(node, self._value)
        self._new[node].meta = dict(node.meta)

    def _value(self, node: Node) -> Node:
        """A value in the new graph; a view of what a call gives is made outside, since calls give no views."""
        if node not in self._new:
            for needed in node.all_input_nodes:
                self._value(needed)
            self._copy(node)
        return self._new[node]

    def _results(self, calls: Calls) -> list[tuple[int, int]]:
        """Places of the values that someone outside reads, of any of the intervals."""
        found: set[tuple[int, int]] = set()
        for start in calls.starts:
            place = _places(self._items[start : start + calls.length])
            read = (node for node in place if any(user not in place for user in node.users))
            found |= {place[own] for node in read if (own := _own(node, place)) is not None}
        return sorted(found)

    def _function(self, calls: Calls, results: Sequence[tuple[int, int]]) -> GraphModule:
        """The first of the intervals, of its operands."""
        graph, inner = Graph(), dict[Node, Node]()
        for k, operand in enumerate(calls.operands[0]):
            inner[operand] = graph.placeholder(f"operand_{k}")
            inner[operand].meta = {"val": operand.meta["val"]}
        items = self._items[calls.starts[0] : calls.starts[0] + calls.length]
        for node in (*calls.made, *_places(items)):
            inner[node] = graph.node_copy(node, inner.__getitem__)
            inner[node].meta = dict(node.meta)
        graph.output(tuple(inner[items[i][k]] for i, k in results))
        return module_without_code({}, graph)

    def _call(self, name: str, function: GraphModule, calls: Calls, results: Sequence[tuple[int, int]], i: int) -> None:
        self._modules[name] = function
        operands = calls.operands[calls.starts.index(i)]
        body = self._graph.get_attr(name)
        call = self._graph.call_function(invoke_subgraph, (body, name, *map(self._value, operands)))
        values = [self._items[i + at][k] for at, k in results]
        call.meta = {"val": tuple(node.meta["val"] for node in values)}
        for k, node in enumerate(values):
            made = self._graph.call_function(operator.getitem, (call, k))
            made.meta = dict(node.meta)
            self._new[node] = made


def _own(node: Node, inside: Container[Node]) -> Node | None:
    """The value whose memory a node's value is part of; None if that comes from outside."""
    while node in inside:
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        if not is_view(source):
            return node
        node = source.all_input_nodes[0]
    return None
