"""Recurrent layers on a CPU: their loops over time in C++ (`psg_fx/ops/recurrent.cpp`).

A step of the loop of torch's ops is eight calls there and six back, of which one is the product with W.  In C++ it is
one parallel loop, and W, packed once, stays in the caches.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import value_of
from psg_fx.ops.recurrent_here import HERE, LIBRARY
from psg_fx.torch_private import native


def loop_in_cpp(gm: GraphModule) -> None:
    """Put the ops in C++ in the place of those that they suit, and begin to compile them."""
    for node in gm.graph.nodes:
        if node.target in HERE and _suits(node):
            node.target = HERE[node.target]
            native.begin(LIBRARY)


def _suits(node: Node) -> bool:
    """Whether all is float32, and no state is projected."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    projected = dict(zip(names, node.args, strict=True)).get("projection") is not None
    return not projected and all(value_of(tensor).dtype is torch.float32 for tensor in node.all_input_nodes)
