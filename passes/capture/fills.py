"""Fills of a fixed size, made by a tensor that lends its dtype and device: by themselves, they read no sample.

x.new_zeros(3, 4)  ->  torch.zeros(3, 4)        torch.ones_like(x[0])  ->  torch.ones(..)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.source import provenance

aten = torch.ops.aten
_FILLS = {
    aten.new_zeros.default: aten.zeros.default, aten.zeros_like.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default, aten.ones_like.default: aten.ones.default,
    aten.new_full.default: aten.full.default, aten.full_like.default: aten.full.default,
    aten.new_empty.default: aten.zeros.default, aten.empty_like.default: aten.zeros.default,
}  # fmt: skip
"""Each op, and what makes the same by itself; what is empty may hold anything."""


def write_fills(gm: GraphModule) -> None:
    """Write those by themselves whose size does not follow the batch, in front of what reads them first."""
    for node in list(gm.graph.nodes):
        if not is_fill(node):
            continue
        op: Any = node.target
        value = node.meta["val"]
        if any(size.free_symbols for size in facts.shape(value)):
            continue
        given = {a.name: v for a, v in zip(op._schema.arguments, node.args, strict=False)} | node.kwargs
        fill = [given["fill_value"]] if "fill_value" in given else []
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        with gm.graph.inserting_before(min(node.users, default=node)):
            new = gm.graph.call_function(_FILLS[op], ([int(s) for s in value.shape], *fill), options)
        new.meta = provenance(node) | {"val": value}
        node.replace_all_uses_with(new)
        _erase(node)


def is_fill(node: Node) -> bool:
    """Whether it is one that another tensor lends its dtype and device, or its sizes, too."""
    return node.op == "call_function" and node.target in _FILLS


def _erase(node: Node) -> None:
    """A node, and what only it has read."""
    above = node.all_input_nodes
    node.graph.erase_node(node)
    for read in above:
        if read.op == "call_function" and not read.users and not read.is_impure():
            _erase(read)
