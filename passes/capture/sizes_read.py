"""What code asks for a size alone: a batch of one may have another, and no op of the graph tells.

A squeeze takes its dim; and of a batch of one, `h[:2]` has one row and `h[1]` is an error, where torch, which takes a
batch for two or more, makes plain numbers of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import CaptureFailed
from psg_fx.graph import facts
from psg_fx.graph.at_sizes import SEVERAL, runs_as_said
from psg_fx.source import locate

aten = torch.ops.aten
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def squeezed_for_a_size(gm: GraphModule) -> str:
    """The place of the first squeeze that takes a dim of a batch of one alone and whose values nobody reads; "" for
    none.  gm: before what nobody reads is taken away.
    """
    squeezes = (node for node in _unread(gm) if node.target in _SQUEEZES)
    return next((locate(node) for node in squeezes if _takes_samples(node)), "")


def require_sizes_of_one(gm: GraphModule) -> None:
    """Raise CaptureFailed where an op whose values nobody reads has for a batch of one another size than the graph
    says, or does not run: one graph for each batch size holds what each has.
    """
    for node in _unread(gm):
        if node.target not in _SQUEEZES and _runs_as_said(node, SEVERAL) and not _runs_as_said(node, 1):
            name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
            raise CaptureFailed(
                f"{name} has another size for a batch of one sample, or does not run", where=locate(node),
                why="nothing but its size is read, or whether it fails, and the graph holds what several samples have",
                fix="take sizes from the input itself (x.shape[0]), or from dims that are not the samples'",
            )  # fmt: skip


def _unread(gm: GraphModule) -> list[Node]:
    """The nodes whose values nothing reads."""
    read: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in read or node.is_impure():
            read.update((node, *node.all_input_nodes))
    return [node for node in gm.graph.nodes if node not in read]


def _runs_as_said(node: Node, size: int) -> bool:
    """Whether an op of torch gives for so many samples what the graph says of them."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return size == 1
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return runs_as_said(target, args, kwargs, node.meta["val"], size)


def _takes_samples(node: Node) -> bool:
    """Whether it takes a dim that has size 1 for one sample, and another one for several."""
    value: torch.Tensor = node.all_input_nodes[0].meta["val"]
    named: Any = node.args[1] if len(node.args) > 1 else range(value.dim())
    sizes = [facts.expr(value.shape[dim]) for dim in (named if isinstance(named, Sequence) else [named])]
    return any(size.free_symbols and facts.at_one(size) == 1 for size in sizes)
