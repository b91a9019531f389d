"""A graph in consecutive parts, so that layers that are alike are differentiated once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from psg_fx.graph import facts
from psg_fx.graph.facts import fact
from psg_fx.graph.repeats import Item, Token, repeats, sizes_and_ops, tokens_of
from psg_fx.torch_private.graphs import module_without_code

FEWEST = 12
"""Ops of a part that comes again: to copy fewer saves nothing."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive ops of a graph: a function of what they read.

    nodes: in order.  kind: what is computed, so that segments of one kind are one function of what they read;
    None where it is like no other.
    """

    root: GraphModule
    nodes: tuple[Node, ...]
    kind: Any = None

    @cached_property
    def reads(self) -> tuple[Node, ...]:
        """The tensors and sizes from outside, in the order of reading; an input where no tensor is read."""
        own = set(self.nodes)
        read = (n for node in self.nodes for n in node.all_input_nodes)
        found = tuple(dict.fromkeys(n for n in read if n not in own and n.op != "get_attr"))
        if any(map(_is_tensor, found)):
            return found
        return (*found, next(filter(_is_tensor, facts.placeholders(self.root))))

    @cached_property
    def module(self) -> GraphModule:
        """The function, of what it reads; its placeholders and ops are copies, in order."""
        graph = Graph()
        made: dict[Node, Node] = {}
        for node in self.reads:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(node.meta)
        for node in self.nodes:
            for constant in node.all_input_nodes:
                if constant.op == "get_attr" and constant not in made:
                    made[constant] = graph.node_copy(constant)
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(())
        return module_without_code(self.root, graph)

    @cached_property
    def copies(self) -> tuple[Node, ...]:
        """Of `nodes`, those of `module`."""
        return tuple(n for n in self.module.graph.nodes if n.op not in ("placeholder", "get_attr", "output"))


def segments(gm: GraphModule) -> tuple[list[Node], list[Segment]]:
    """Sizes that follow from those of the inputs, and the ops after them, cut where a part comes again: one segment,
    with the sizes in it, if none does, and where sizes depend on values.
    """
    ops = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    whole: tuple[list[Node], list[Segment]] = [], [Segment(gm, tuple(ops))]
    known = facts.graph_facts(gm)
    if len(ops) < 3 * FEWEST or not _symbols(ops) <= {known.batch, *known.rows}:
        return whole
    first, items = sizes_and_ops(gm)
    sizes = [n for n in first if n.op == "call_function"]
    tokens = tokens_of(items, with_draws=True)
    borders = _borders(tokens)
    if not borders or len(sizes) + sum(map(len, items)) != len(ops):
        return whole
    cuts = sorted({0, *(place for pair in borders for place in pair), len(items)})
    found = [_segment(gm, items[a:b], tokens[a:b] if (a, b) in borders else None) for a, b in pairwise(cuts)]
    return (sizes, found) if all(_is_passed(n) for each in found for n in each.reads) else whole


def _borders(tokens: Sequence[Token]) -> set[tuple[int, int]]:
    """Where each part begins and ends that comes again, three times at least."""
    found = [repeat for repeat in repeats(tokens, FEWEST) if len(repeat.starts) > 2]
    return {(start, start + repeat.length) for repeat in found for start in repeat.starts}


def _symbols(nodes: Iterable[Node]) -> set[Any]:
    """Those in the shapes of values."""
    values = (value for node in nodes for value in facts.tensors(node.meta.get("val")))
    return set().union(*(facts.expr(size).free_symbols for value in values for size in value.shape))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_passed(node: Node) -> bool:
    """Whether a value can be handed from one segment to another."""
    return _is_tensor(node) or isinstance(node.meta.get("val"), torch.SymInt)


def _segment(gm: GraphModule, items: Sequence[Item], tokens: Sequence[Token] | None) -> Segment:
    nodes = tuple(node for item in items for node in item)
    return Segment(gm, nodes, None if tokens is None else tuple(_wired(items, tokens)))


def _wired(items: Sequence[Item], tokens: Sequence[Token]) -> Iterator[Any]:
    """What the ops do, whether parameters meet the samples there, and which value each of them reads."""
    number: dict[Node, int] = {}
    for item, token in zip(items, tokens, strict=True):
        read: list[int] = []
        map_arg((item[0].args, item[0].kwargs), lambda n: read.append(number.setdefault(n, len(number))))  # noqa: B023
        yield token, bool(fact(item[0]).site), tuple(read)
        for node in item:
            number[node] = len(number)
