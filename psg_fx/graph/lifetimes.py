"""How long the values of a graph live, and how large they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.tensors import product


def lifetimes(order: Sequence[Node]) -> tuple[dict[Node, Node], dict[Node, int]]:
    """For each node the one whose memory it shows; and the index of the op that last reads that memory."""
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for index, node in enumerate(order):
        owner[node] = owner[node.all_input_nodes[0]] if is_view(node) else node
        if node.op != "output":
            last.update({owner[used]: index for used in node.all_input_nodes})
    return owner, last


def is_view(node: Node) -> bool:
    """Whether the op returns a part of its first argument: by its schema, or as `getitem` does."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(value.alias_info is not None for value in schema.returns)


def memory_of(node: Node) -> Node:
    """The node that makes the memory in which the value of this one lies."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def bytes_of(node: Node, batch: sympy.Symbol, size: int, others: Mapping[sympy.Symbol, int] | None = None) -> int:
    """Bytes of a node's tensors for `size` samples.  others: further symbols in their sizes."""
    known = {**(others or {}), batch: size}
    return sum(
        product(int(s.subs(known)) for s in facts.shape(value)) * value.dtype.itemsize
        for value in facts.tensors(node.meta.get("val"))
    )
