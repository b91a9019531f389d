"""joins: what many calls of a subgraph return is laid side by side by torch, not by a kernel.

A kernel that makes a part of a concatenation writes it where it belongs.  What a call returns is in memory already, and
inductor copies each part in a loop of its own, fifteen lines of C++ and a barrier: of 24 layers, kernels of 500
arguments that take g++ longer than all others together.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.lifetimes import is_view
from psg_fx.ops.joined import joined, stacked

from .calls import invoke_subgraph

aten = torch.ops.aten

MANY = 16
"""Parts from calls that are worth a call of torch."""

_JOINS = {aten.cat.default: joined, aten.stack.default: stacked}


def join_by_torch(gm: GraphModule) -> GraphModule:
    """Concatenations of what calls return, in place; the graph itself."""
    for node in gm.graph.nodes:
        if node.target in _JOINS and sum(map(_is_returned, node.args[0])) >= MANY:
            parts, *dim = node.args
            node.target, node.args = _JOINS[node.target], (parts, *(dim or [node.kwargs.get("dim", 0)]))
            node.kwargs = {}
    return gm


def _is_returned(part: Node) -> bool:
    """Whether it is what a call returns, or a view of that."""
    while part.target is not invoke_subgraph and is_view(part):
        part = part.all_input_nodes[0]
    return part.target is invoke_subgraph
