"""What a node of a graph is given: arguments by the names of its op's schema, and numbers that depend on the batch."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.tensors import SYMBOLS


def op_name(node: Node) -> str:
    """`aten.mean` for the error texts; a custom function has its own name."""
    target = node.target
    if (call := custom_call(target)) is not None:
        return call.name
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    return getattr(target, "__name__", str(target))


def bound(node: Node) -> dict[str, Any]:
    """The arguments of an op by the names of its schema, defaults included."""
    target = node.target
    if target is operator.getitem:
        return {"self": node.args[0], "index": node.args[1]}
    assert isinstance(target, torch._ops.OpOverload)
    given: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            given[argument.name] = node.args[position]
        else:
            given[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return given


def dim_of(node: Node, ndim: int) -> int:
    """The argument `dim` of an op, from the front."""
    dim: int = bound(node)["dim"] % ndim
    return dim


def flat_nodes(argument: object) -> Iterator[Node]:
    """The nodes in an argument, nested lists included."""
    if isinstance(argument, Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for part in argument:
            yield from flat_nodes(part)


def is_symbolic(node: Node, batch: sympy.Symbol) -> bool:
    """Whether the node is a number (SymInt, SymFloat) that depends on B."""
    value = node.meta.get("val")
    if isinstance(value, SYMBOLS):
        return batch in value.node.expr.free_symbols
    return False


def symbolic_values(node: Node, batch: sympy.Symbol) -> list[Node]:
    """The numbers that depend on B and enter `node` as values rather than as sizes: `x / x.shape[0]`."""
    values = value_arguments(node)
    given = ((name, n) for name, argument in bound(node).items() for n in flat_nodes(argument)) if values else ()
    return [n for name, n in given if name in values and is_symbolic(n, batch)]


def value_arguments(node: Node) -> list[str]:
    """The names of the arguments whose numbers are values rather than sizes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket is torch.ops.aten.arange:
        return []  # where arange ends is its size
    types = {a.name: str(a.real_type) for a in node.target._schema.arguments}
    drawn = ("low", "high") if op_name(node).startswith("aten.randint") else ()  # between which numbers, as ints
    return [name for name, kind in types.items() if name in drawn or ("SymInt" not in kind and "int" not in kind)]


def symbolic_sizes(node: Node, batch: sympy.Symbol) -> list[Node]:
    """The numbers that depend on B and enter `node` as sizes or positions."""
    values, is_op = value_arguments(node), isinstance(node.target, torch._ops.OpOverload)
    given = bound(node) if is_op else dict(enumerate((*node.args, *node.kwargs.values())))
    found = [n for name, argument in given.items() if name not in values for n in flat_nodes(argument)]
    return [n for n in found if is_symbolic(n, batch)]


def unseen_size(node: Node, batch: sympy.Symbol) -> Node | None:
    """A number that depends on B, decides what a value holds, and does not show in its sizes: where `arange` begins,
    by how much `roll` shifts.
    """
    values = list(facts.tensors(node.meta.get("val")))
    sizes = symbolic_sizes(node, batch)
    if not sizes or not values:
        return None
    if node.target in (torch.ops.aten.arange.start, torch.ops.aten.arange.start_step) and node.args[0] in sizes:
        return sizes[0]
    return None if any(batch in size.free_symbols for v in values for size in facts.shape(v)) else sizes[0]


def numbers_of_samples(node: Node, batch: sympy.Symbol) -> list[Node]:
    """The numbers that depend on B and decide what `node` holds: those that are values, and sizes that do not show."""
    unseen = unseen_size(node, batch)
    return symbolic_values(node, batch) + ([] if unseen is None else [unseen])
