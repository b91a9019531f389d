"""sums: a sum of tensors that are stacked for it is additions, on a CPU.

Inductor would copy each of them into the stack, in a loop of its own with a barrier behind it, and sum the stack in
another loop: eight loops for the norms of an LSTM's seven parameters.  Additions are one, which computes what is
elementwise in them, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

_EXACT = (torch.float32, torch.float64)
"""Dtypes that sums are accumulated in as they are."""


def add_what_is_stacked(gm: GraphModule) -> GraphModule:
    """The same function, in place; the graph itself."""
    for node in list(gm.graph.nodes):
        if (parts := _summed(node)) is not None:
            total = parts[0]
            with gm.graph.inserting_before(node):
                for part in parts[1:]:
                    total = gm.graph.call_function(aten.add.Tensor, (total, part))
            stack = node.args[0]
            node.replace_all_uses_with(total)
            gm.graph.erase_node(node)
            gm.graph.erase_node(stack)
    return gm


def _summed(node: Node) -> Sequence[Node] | None:
    """The tensors whose sum it is, if they are stacked for nothing else."""
    if node.target is not aten.sum.dim_IntList or list(node.args[1:]) != [[0]] or node.kwargs:
        return None
    (stack,) = node.all_input_nodes
    if stack.target is not aten.stack.default or len(stack.users) > 1 or stack.args[1:] not in ((), (0,)):
        return None
    parts: Sequence[Node] = stack.args[0]  # type: ignore[assignment]
    return parts if getattr(stack.meta.get("val"), "dtype", None) in _EXACT else None
