"""Nodes that passes write one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node


def call(gm: GraphModule, op: Any, *arguments: Any, **named: Any) -> Node:
    """A node for an op on nodes and plain values, where the graph inserts, with its value."""
    made = gm.graph.call_function(op, arguments, named)
    values = torch.fx.node.map_arg(arguments, lambda node: node.meta["val"])
    first: Any = next(n.meta["val"] for n in made.all_input_nodes if isinstance(n.meta["val"], torch.Tensor))
    with first.fake_mode:
        made.meta["val"] = op(*values, **named)
    return made
