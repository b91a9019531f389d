"""Plain torch functions put into a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import InternalError
from psg_fx.graph.strides import free_of_strides
from psg_fx.graph.tracing import trace
from psg_fx.source import locate, provenance


def splice(
    gm: GraphModule, before: Node, function: Callable[..., Any], arguments: Sequence[Node],
    each: Callable[[Node], None] = lambda made: None,
) -> Any:  # fmt: skip
    """`function(*arguments)` in front of a node, whose lines its nodes say.  What it returns, of nodes.

    each: told of every new node.
    """
    with torch.no_grad():
        traced = free_of_strides(trace(function, [n.meta["val"] for n in arguments]))
    traced.graph.eliminate_dead_code()
    made: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with gm.graph.inserting_before(before):
        for old in traced.graph.nodes:
            if old.op in ("placeholder", "output"):
                continue
            if old.op == "get_attr":
                raise InternalError(
                    "a constant in what a pass writes", where=locate(before), why=str(old.target),
                    fix="please report this with the model",
                )  # fmt: skip
            made[old] = gm.graph.node_copy(old, made.__getitem__)
            made[old].meta = {**provenance(before), "val": old.meta.get("val")}
            each(made[old])
    return torch.fx.map_arg(traced.graph.output_node().args[0], made.__getitem__)
