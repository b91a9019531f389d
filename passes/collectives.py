"""collectives: ops between processes are written as functional collectives, which torch's compiler knows."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.stages import Stage
from psg_fx.graph.tracing import trace
from psg_fx.ops.across import written

from .runner import graph_pass


@graph_pass("collectives", before=Stage.TIDIED, after=Stage.TIDIED)
def collectives(gm: GraphModule) -> GraphModule:
    """After: the graph is that of this process, with `_c10d_functional` ops, in the order of the ops that they are."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and (function := written(node.target)) is not None:
            new = _spliced(gm, node, function)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return gm


def _spliced(gm: GraphModule, node: Node, function: Any) -> Node:
    """What the op is, in front of it."""
    value, *rest = node.args
    assert isinstance(value, Node)
    with torch.no_grad():
        traced = trace(lambda x: function(x, *rest), [value.meta["val"]])
    (placeholder,) = facts.placeholders(traced)
    copies: dict[Node, Any] = {placeholder: value}
    with gm.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                copies[inner] = gm.graph.node_copy(inner, copies.__getitem__)
                copies[inner].meta["psg_fx_pass"] = "collectives"
    (result,) = traced.graph.output_node().args
    assert isinstance(result, Node)
    return copies[result]  # type: ignore[no-any-return]
