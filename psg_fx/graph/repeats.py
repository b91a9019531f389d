"""Parts of a graph that come again, which are to be differentiated once, and compiled once.

Layers that are alike have the same ops in the same order: in forward, in backward, and in what is computed of their
gradients.  An interval of the order of nodes is convex, since all that it reads stands before it, and all who read it
after.  So intervals that agree in their ops, and in which of these read which, are one function of what they read, and
are called as often as they are found.  Nothing has to be known of layers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from psg_fx.graph.same_op import draws

PERIODS = 32
"""Distances that are tried: those at which most ops come again."""

Token = int
Item = tuple[Node, ...]
"""An op, and the parts of its result if that is a tuple."""


@dataclass(frozen=True)
class Repeat:
    """Intervals [start, start + length) of a sequence that are alike, and apart from each other."""

    starts: tuple[int, ...]
    length: int

    @property
    def saved(self) -> int:
        return (len(self.starts) - 1) * self.length


def repeats(tokens: Sequence[Token], fewest: int) -> list[Repeat]:
    """What comes again, at least so many tokens long, first what saves most."""
    left, found, fresh = list(tokens), [], -1
    while (best := max(_repeats_once(left, fewest), key=lambda r: r.saved, default=None)) is not None:
        found.append(best)
        for start in best.starts:
            for k in range(start, start + best.length):
                left[k], fresh = fresh, fresh - 1
    return found


def _repeats_once(tokens: Sequence[Token], fewest: int) -> Iterator[Repeat]:
    """For each likely period, the stretches that come again after it, as often as they do."""
    for period in _periods(tokens, fewest):
        agrees = [a == b for a, b in zip(tokens, tokens[period:], strict=False)]
        for begin, end in _stretches(agrees):
            length = min(end - begin, period)
            if length < fewest:
                continue
            starts = [begin, begin + period]
            while all(agrees[starts[-1] : starts[-1] + length]) and starts[-1] + length <= len(agrees):
                starts.append(starts[-1] + period)
            yield Repeat(tuple(starts), length)


def _periods(tokens: Sequence[Token], fewest: int) -> list[int]:
    """The most frequent distances at which a token comes again; of short ones, the multiples that are long enough."""
    last: dict[Token, int] = {}
    count: Counter[int] = Counter()
    for i, token in enumerate(tokens):
        if token in last:
            distance = i - last[token]
            count[distance * -(-fewest // distance)] += 1
        last[token] = i
    return [period for period, _ in count.most_common(PERIODS)]


def _stretches(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The intervals of which all is true, as long as they are."""
    begin = None
    for i, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = i
        elif not flag and begin is not None:
            yield begin, i
            begin = None


def sizes_and_ops(gm: GraphModule) -> tuple[list[Node], list[Item]]:
    """Inputs and sizes that follow from them, and the ops after them, in the graph's order."""
    first: dict[Node, None] = {}
    items: list[Item] = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") or (
            is_number(node) and all(n in first for n in node.all_input_nodes)
        ):
            first[node] = None
        elif node.op == "call_function" and node.target is not operator.getitem:
            parts = sorted((n for n in node.users if n.target is operator.getitem), key=lambda n: n.args[1])
            items.append((node, *parts))
        elif node.op != "output" and node.target is not operator.getitem:
            raise AssertionError(node.format_node())
    return list(first), items


def is_number(node: Node) -> bool:
    """Whether a node's value is a size."""
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def tokens_of(items: Sequence[Item], with_draws: bool = False) -> list[Token]:
    """Equal for ops that do the same with values of the same kind."""
    numbers: dict[Any, Token] = {}
    return [numbers.setdefault(said(item, with_draws), len(numbers)) for item in items]


def said(item: Item, with_draws: bool = False) -> Any:
    """What an op does with which kinds of values; the op itself where it is like no other.

    with_draws: ops that draw at random are alike, too.
    """
    node = item[0]
    if not _is_plain(node) or (draws(node) and not with_draws):
        return node
    found: Any = [node.target, len(item)]
    found += [part.args[1] for part in item[1:]]
    map_arg((node.args, node.kwargs), lambda n: found.append(_kind(n)))
    found.append(repr(map_arg((node.args, node.kwargs), lambda n: _READ)))
    found += [_kind(part) for part in item]
    return tuple(found)


_READ = ("read",)
"""Stands for a value among an op's arguments, which is not the same as None in its place."""


def _is_plain(node: Node) -> bool:
    """Whether an op is of torch or of psg_fx, makes tensors, and writes nothing."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims", "psg_fx"):
        return False
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return not target._schema.is_mutable and not is_number(node) and all(value is not None for value in values)


def _kind(node: Node) -> Any:
    """What a compiler knows of a value."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        bits = value.is_conj(), value.is_neg()
        return (tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype, value.device, bits)
    if isinstance(value, (list, tuple)):
        return len(value)
    return str(value)
