"""separate: each answer lies in memory of its own.

Parameters may have equal gradients, as the two biases of a recurrent layer have, and those of layers whose outputs are
added up: then one node stands for all of them.  What a step returns is the caller's to write into (noise,
`clip_grad_norm_` of what became `p.grad`), as autograd's gradients are, so all but one of them are copies.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.nodes import call, rename
from psg_fx.graph.stages import Stage
from psg_fx.tensors import product

from .runner import graph_pass

aten = torch.ops.aten


@graph_pass("separate", before=Stage.TIDIED, after=Stage.TIDIED)
def separate(gm: GraphModule) -> GraphModule:
    """After: no two losses or answers share memory."""
    results: list[Node | None] = []
    taken: set[Node] = set()
    copies: dict[Node, Node] = {}  # the last one of each: of a copy, since no op is done twice
    for spec, node in facts.returned(gm):
        if node is not None and spec.kind in ("loss", "answer"):
            if _memory(node) in taken:
                with gm.graph.inserting_before(gm.graph.output_node()):
                    copies[node] = call(gm, aten.clone.default, copies.get(node, node))
                node = copies[node]
                rename(node, spec.title)
            taken.add(_memory(node))
        results.append(node)
    gm.graph.output_node().args = (tuple(results),)
    return gm


def _memory(node: Node) -> Node:
    """The node that makes the memory of this one, if it has all of it: other parts of a value lie beside each other."""
    while is_view(node) and _elements(node) == _elements(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _elements(node: Node) -> object:
    value = node.meta["val"]
    return product(facts.shape(value)) if isinstance(value, torch.Tensor) else None
