"""Arguments of ops in C++ lie as these read them: written so by the kernel that makes them, once for all who read them,
in place of a copy in each op.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import call, written_before
from psg_fx.ops.define import layout_of

aten = torch.ops.aten


def with_contiguous_arguments(gm: GraphModule) -> None:
    """Write, in place, what would be copied contiguous before the first op that reads it."""
    made: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        for value in list(_copied(node)):
            if value not in made:
                with written_before(node, node.meta):
                    made[value] = call(gm, aten.clone.default, value, memory_format=torch.contiguous_format)
            node.replace_input_with(value, made[value])


def _copied(node: Node) -> Iterator[Node]:
    """The tensors that an op copies before it reads them."""
    if lies_as_read := layout_of(node.target):
        for value in node.all_input_nodes:
            tensor = value.meta["val"]
            if isinstance(tensor, torch.Tensor) and not lies_as_read(tensor):
                yield value
