"""Squeezes that code asks for a size alone: of what they take for a batch of one, no op of the graph tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.source import locate

aten = torch.ops.aten
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def squeezed_for_a_size(gm: GraphModule) -> str:
    """The place of the first squeeze that takes a dim of a batch of one alone and whose values nobody reads; "" for
    none.  gm: before what nobody reads is taken away.
    """
    read: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in read or node.is_impure():
            read.update((node, *node.all_input_nodes))
    squeezes = (node for node in gm.graph.nodes if node.target in _SQUEEZES and node not in read)
    return next((locate(node) for node in squeezes if _takes_samples(node)), "")


def _takes_samples(node: Node) -> bool:
    """Whether it takes a dim that has size 1 for one sample, and another one for several."""
    value: torch.Tensor = node.all_input_nodes[0].meta["val"]
    named: Any = node.args[1] if len(node.args) > 1 else range(value.dim())
    sizes = [facts.expr(value.shape[dim]) for dim in (named if isinstance(named, Sequence) else [named])]
    return any(size.free_symbols and facts.at_one(size) == 1 for size in sizes)
