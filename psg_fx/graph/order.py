"""Ops whose result has the elements of their first argument, in their order: values are followed through them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from psg_fx.op_table import Order, enter, known

enter("clone", "alias", "detach", "contiguous", "to", "_to_copy", "lift_fresh", "lift_fresh_copy", order=Order.SAME)
enter(
    "view.default", "reshape", "_unsafe_view", "_reshape_alias", "view_copy.default", "flatten", "unflatten", "squeeze",
    "unsqueeze", order=Order.RESHAPED,
)  # fmt: skip


def is_same(node: Node) -> bool:
    """Whether it has the elements of its first argument, each in its place, in whatever dtype."""
    return known(node.target).order is Order.SAME


def itself(node: Any) -> Any:
    """The node of which another one is a copy, in what dtype; anything else as it is."""
    while isinstance(node, Node) and is_same(node):
        node = node.args[0]
    return node


def is_reshaped(node: Node) -> bool:
    """Whether it has the elements of its first argument, in their order, in another shape."""
    return known(node.target).order is Order.RESHAPED
