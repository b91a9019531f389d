"""Nodes that passes write one by one."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from psg_fx.graph.facts import KEY, input_spec, placeholders

aten = torch.ops.aten

_FILLS = {"zeros": 0.0, "ones": 1.0}


def filled_with(node: Node) -> Any:
    """The number that an op writes everywhere (or a node for it), None where it does something else."""
    kind = getattr(node.target, "_opname", "").removeprefix("new_").removesuffix("_like")
    if node.op != "call_function" or kind != "full":
        return _FILLS.get(kind) if node.op == "call_function" else None
    place = [argument.name for argument in node.target._schema.arguments].index("fill_value")  # type: ignore[union-attr]
    return node.args[place] if place < len(node.args) else node.kwargs["fill_value"]


def is_zeros(node: Node) -> bool:
    """Whether it makes zeros."""
    number = filled_with(node)
    return isinstance(number, (int, float)) and number == 0


def is_detach(node: Node) -> bool:
    """Whether gradients end there."""
    return node.target in (aten.detach.default, aten.detach_.default)


def call(gm: GraphModule, op: Any, *arguments: Any, **named: Any) -> Node:
    """A node for an op on nodes and plain values, where the graph inserts, with its value."""
    made = gm.graph.call_function(op, arguments, named)
    values = torch.fx.node.map_arg(arguments, lambda node: node.meta["val"])
    first: Any = next(n.meta["val"] for n in made.all_input_nodes if isinstance(n.meta["val"], torch.Tensor))
    with first.fake_mode:
        made.meta["val"] = op(*values, **named)
    return made


def size_of(graph: Graph, node: Node, dim: int, times: int = 1) -> Node:
    """A node for the size of a dim of a node's value, or for so many times that, where the graph inserts, with its
    value.
    """
    size = graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = value_of(node).shape[dim]
    return size if times == 1 else multiple(graph, size, times)


def batch_size(gm: GraphModule, times: int = 1) -> Node | None:
    """A node for the batch size, or for so many times that, where the graph inserts; None without an input that has
    samples.
    """
    dims = ((node, input_spec(node).samples) for node in placeholders(gm))
    return next((size_of(gm.graph, node, dim, times) for node, dim in dims if dim is not None), None)


def multiple(graph: Graph, size: Node, times: int) -> Node:
    """A node for so many times a size, where the graph inserts, with its value."""
    made = graph.call_function(operator.mul, (size, times))
    made.meta["val"] = size.meta["val"] * times
    return made


def numbers_along(gm: GraphModule, like: Node, dim: int, step: int = 1) -> Node:
    """0, step, 2·step, .. along a dim of a node's value, to be broadcast, where the graph inserts."""
    value = value_of(like)
    dim %= value.ndim
    size = value.shape[dim]
    numbers = gm.graph.call_function(aten.arange.start_step, (0, size * step, step), {"device": value.device})
    with value.fake_mode:  # type: ignore[attr-defined]
        numbers.meta["val"] = torch.arange(0, size * step, step, device=value.device)
    return call(gm, aten.view.default, numbers, [size, *[1] * (value.ndim - dim - 1)])


def output(gm: GraphModule, node: Node, index: Any) -> Node:
    """One of the outputs of a node that has several, where the graph inserts, with its value."""
    made = gm.graph.call_function(operator.getitem, (node, index))
    made.meta["val"] = node.meta["val"][index]
    return made


def value_of(node: Any) -> torch.Tensor:
    """The tensor that a node stands for, without values."""
    found: torch.Tensor = node.meta["val"]
    return found


@contextlib.contextmanager
def written_before(place: Node, meta: Mapping[str, Any]) -> Iterator[None]:
    """While open, nodes are written before this one; each also says what `meta` does, such as where in the model it is
    and which pass it is of (but no facts, which are of one value).
    """
    last, meta = place.prev, {key: said for key, said in meta.items() if key != KEY}
    with place.graph.inserting_before(place):
        yield
    node = place.prev
    while node is not last:
        node.meta = {**meta, **node.meta}
        node = node.prev


def put_in_place(old: Node, new: Node) -> None:
    """Put one node in the place of another, under its name and with its facts."""
    name = old.name
    new.meta = old.meta | new.meta
    old.replace_all_uses_with(new)
    old._rename(f"{name}_alone")
    new.name = name  # `_rename` would add a number: a graph gives no name twice


def in_order(gm: GraphModule) -> None:
    """Every node after its operands: the others stay where they are."""
    placed: set[Node] = set()
    for node in list(gm.graph.nodes):
        place(node, node, placed)


def place(node: Node, before: Node, placed: set[Node]) -> None:
    """Put a node in front of another one, and in front of it what it reads and is not `placed` yet."""
    waiting = [node]
    while waiting:
        lacking = [operand for operand in waiting[-1].all_input_nodes if operand not in placed]
        if lacking:
            waiting.append(lacking[0])
            continue
        ready = waiting.pop()
        if ready not in placed:
            placed.add(ready)
            if ready is not before:
                before.prepend(ready)


def rename(node: Node, name: str) -> None:
    """Name an op for what it holds."""
    if node.op == "call_function":
        node._rename(re.sub(r"\W", "_", name))
