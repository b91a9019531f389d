"""collectives: ops between processes are written as functional collectives, which torch's compiler knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph.splicing import splice
from psg_fx.graph.stages import Stage
from psg_fx.ops.across import written

from .runner import graph_pass


@graph_pass("collectives", before=Stage.TIDIED, after=Stage.TIDIED)
def collectives(gm: GraphModule) -> GraphModule:
    """After: the graph is that of this process, with `_c10d_functional` ops, in the order of the ops that they are."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and (function := written(node.target)) is not None:
            value, *rest = node.args
            new = splice(gm, node, partial(_on, function, rest), [value], _named)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return gm


def _on(function: Callable[..., Tensor], rest: Sequence[Any], value: Tensor) -> Tensor:
    return function(value, *rest)


def _named(node: Node) -> None:
    node.meta["psg_fx_pass"] = "collectives"
