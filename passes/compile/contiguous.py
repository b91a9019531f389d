"""Arguments of ops in C++ lie as these read them: written so by the kernel that makes them, once for all who read them,
in place of a copy in each op.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, written_before
from psg_fx.ops.define import layout_of

aten = torch.ops.aten
_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)


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
    lies_as_read, values = layout_of(node.target), node.all_input_nodes
    if node.target in _PRODUCTS:
        lies_as_read, values = _has_rows_or_columns, values[-2:]  # behind the bias
    for value in values:
        tensor = value.meta.get("val")
        if lies_as_read and isinstance(tensor, torch.Tensor) and not lies_as_read(tensor):
            yield value


def _has_rows_or_columns(matrices: torch.Tensor) -> bool:
    """Whether the BLAS reads the matrices `[B, m, n]` of a batched product as they lie.  On a CPU torch copies others
    one by one, such as those of a gradient that is the same for all positions (`h.mean(1)`): one row in memory.
    """
    (_, rows, columns), (_, down, along) = facts.shape(matrices), map(facts.expr, matrices.stride())
    return bool((along == 1 and (down != 0 or rows == 1)) or (down == 1 and (along != 0 or columns == 1)))
