"""Roundings that the code asks for: `h - h.to(torch.bfloat16).float()`.

Inductor computes with what a value was before it was rounded, wherever one kernel does both.  That is right to rounding
where a model is computed in half precision, and wrong where the code asks what is left over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph.lifetimes import is_view

aten = torch.ops.aten


def reads_roundings(gm: GraphModule) -> bool:
    """Whether a captured graph rounds a value to fewer bits, and computes with it in more."""
    return any(
        node.target is aten._to_copy.default and _rounds(node) and _is_read_wider(node) for node in gm.graph.nodes
    )


def _rounds(node: Node) -> bool:
    return _bytes(node.args[0]) > _bytes(node) > 0


def _is_read_wider(node: Node) -> bool:
    size = node.meta["val"].itemsize
    return any((is_view(user) and _is_read_wider(user)) or _bytes(user) > size for user in node.users)


def _bytes(node: Any) -> int:
    """Of an element of floats; 0 of other values, and of numbers in the code."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.itemsize if isinstance(value, Tensor) and value.is_floating_point() else 0
