"""Writes into what is a copy for some batch sizes and the value itself for others.

`h.transpose(0, 1).contiguous().relu_()` leaves h as it is, unless the batch has one sample: then the transposed h is
contiguous as it lies, and h is written.  A graph holds one of the two.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.lifetimes import is_view
from psg_fx.source import locate
from psg_fx.torch_private.ops import writes, written_arguments

aten = torch.ops.aten
_RESHAPED = (aten.reshape.default, aten._unsafe_view.default, aten.contiguous.default)


def writes_a_copy(gm: GraphModule) -> str:
    """The place of the first write in place whose target may or may not be a copy, or ""; gm: before such writes are
    made functional.
    """
    for node in gm.graph.nodes:
        if writes(node.target):
            for written, given in zip(written_arguments(node.target), node.args, strict=False):
                if written and isinstance(given, Node) and _may_be_a_copy(_memory_of(given)):
                    return locate(node)
    return ""


def _memory_of(node: Node) -> Node:
    """The node in whose memory a value lies, through views and writes in place."""
    while is_view(node) and node.target not in _RESHAPED:
        node = node.all_input_nodes[0]
    return node


def _may_be_a_copy(node: Node) -> bool:
    """Whether it is made by `contiguous` or `reshape`, which copy only what does not lie in memory as they need it."""
    return node.target in _RESHAPED or (node.target is aten.clone.default and "memory_format" in node.kwargs)
