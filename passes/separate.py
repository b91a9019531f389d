"""separate: each answer lies in memory of its own, sums as their parameters do.

Parameters may have equal gradients, as the two biases of a recurrent layer have, and those of layers whose outputs are
added up: then one node stands for all of them.  What a step returns is the caller's to write into (noise,
`clip_grad_norm_` of what became `p.grad`), as autograd's gradients are, so all but one of them are copies.  As autograd
lays out the gradients of a parameter that is transposed or channels-last, sums are laid out, too: fused optimizers walk
both by their memory, and ask nothing about strides.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.nodes import call, rename, value_of
from psg_fx.graph.stages import Stage
from psg_fx.tensors import is_contiguous, memory_order, product

from .runner import graph_pass

aten = torch.ops.aten


@graph_pass("separate", before=Stage.TIDIED, after=Stage.TIDIED)
def separate(gm: GraphModule) -> GraphModule:
    """After: no two losses or answers share memory, and an answer of a parameter's shape has its strides."""
    tracked = {facts.input_spec(n).name: n for n in facts.placeholders(gm) if facts.input_spec(n).tracked}
    results: list[Node | None] = []
    taken: set[Node] = set()
    copies: dict[Node, Node] = {}  # the last one of each: of a copy, since no op is done twice
    for spec, node in facts.returned(gm):
        if node is not None and spec.kind in ("loss", "answer"):
            if spec.name in tracked:
                node = _laid_out_as(gm, node, tracked[spec.name], spec.title)
            if _memory(node) in taken:
                with gm.graph.inserting_before(gm.graph.output_node()):
                    copies[node] = call(gm, aten.clone.default, copies.get(node, node))
                node = copies[node]
                rename(node, spec.title)
            taken.add(_memory(node))
        results.append(node)
    gm.graph.output_node().args = (tuple(results),)
    return gm


def _laid_out_as(gm: GraphModule, node: Node, parameter: Node, title: str) -> Node:
    """The value with the strides of a parameter of its shape, if that fills its memory; autograd, too, takes contiguous
    ones elsewhere.
    """
    like = value_of(parameter)
    order = memory_order(like)
    fills, alike = is_contiguous(like.permute(order)), facts.shape(value_of(node)) == facts.shape(like)
    if is_contiguous(like) or not (fills and alike):
        return node
    with gm.graph.inserting_before(gm.graph.output_node()):
        found = call(gm, aten.permute.default, node, order)
        found = call(gm, aten.clone.default, found, memory_format=torch.contiguous_format)
        found = call(gm, aten.permute.default, found, [order.index(d) for d in range(len(order))])
    rename(found, title)
    return found


def _memory(node: Node) -> Node:
    """The node that makes the memory of this one, if it has all of it: other parts of a value lie beside each other."""
    while is_view(node) and _elements(node) == _elements(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _elements(node: Node) -> object:
    value = node.meta["val"]
    return product(facts.shape(value)) if isinstance(value, torch.Tensor) else None
