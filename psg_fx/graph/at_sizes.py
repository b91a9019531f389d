"""Ops of a graph for all batch sizes at one of them: on the meta device, where nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from psg_fx.graph import facts
from psg_fx.tensors import SYMBOLS, number_at


def sized(value: Any, size: int) -> Any:
    """A value of a graph, a tensor without its numbers, where all numbers of samples and of rows are `size`."""
    if isinstance(value, SYMBOLS):
        return number_at(value, dict.fromkeys(value.node.expr.free_symbols, size))
    if isinstance(value, torch.Tensor):
        shape, strides = ([sized(n, size) for n in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def runs_as_said(op: Any, args: Any, kwargs: Any, found: Any, size: int) -> bool:
    """Whether an op gives for so many samples what its result in a graph for all sizes says of them."""
    given = pytree.tree_map(lambda value: sized(value, size), (tuple(args), dict(kwargs)))
    try:
        alone = op(*given[0], **given[1])
    except Exception:
        return False
    return [t.shape for t in facts.tensors(alone)] == [sized(t, size).shape for t in facts.tensors(found)]


SEVERAL = 64
"""Samples of a batch of several."""


def sized_arguments(node: Node, size: int) -> Any:
    """The arguments of a node, so: those by place, and those by name."""
    given = (node.args, node.kwargs)
    return map_aggregate(given, lambda x: sized(x.meta["val"] if isinstance(x, Node) else x, size))
