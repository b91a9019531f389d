"""Writes that the functional form of a graph does not do as torch does.

Parts of `unbind` that are written into are those of `select`: functionalisation makes a number of the batch size where
it writes through an unbound part.  Others are refused.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph.written_copies import lost_write

aten = torch.ops.aten


def select_what_is_written(root: GraphModule) -> None:
    """In place, in the graphs inside, too."""
    for gm in root.modules():
        if not isinstance(gm, GraphModule):
            continue
        for unbind in gm.graph.find_nodes(op="call_function", target=aten.unbind.int):
            parts = [part for part in unbind.users if part.target is operator.getitem]
            if len(parts) == len(unbind.users) and any(map(_is_written, parts)):
                x, dim = unbind.args[0], unbind.args[1] if len(unbind.args) > 1 else unbind.kwargs.get("dim", 0)
                for part in parts:
                    part.target, part.args = aten.select.int, (x, dim, part.args[1])
                gm.graph.erase_node(unbind)
                gm.recompile()


def require_kept_writes(gm: GraphModule) -> None:
    """Refuse a write through a view that no graph is told of."""
    if (lost := lost_write(gm)) is not None:
        raise NotYetSupported(
            "a write in place through a view that a graph does not follow", where=lost.where, why=lost.why,
            fix=lost.fix,
        )  # fmt: skip


def _is_written(node: Node) -> bool:
    """Whether an op writes into the node's value, or into a view of it."""
    for user in node.users:
        if isinstance(user.target, torch._ops.OpOverload) and user.args and user.args[0] is node:
            first = user.target._schema.arguments[0].alias_info
            if first is not None and (first.is_write or _is_written(user)):
                return True
    return False
