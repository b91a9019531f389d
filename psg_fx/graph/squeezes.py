"""Squeezes in a graph for all batch sizes: a batch of one sample would have its sample dim taken, too."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.sample_axis import positive

aten = torch.ops.aten
_SQUEEZES = (aten.squeeze, aten.squeeze_copy)


_ASKED = "psg_fx_asked"


def name_squeezed_dims(gm: GraphModule) -> dict[Node, list[int]]:
    """Let every squeeze name the dims that are of size 1 in this graph.  Returns each with the dims that the code has
    it take where they are of size 1.
    """
    found: dict[Node, list[int]] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "overloadpacket", None) not in _SQUEEZES:
            continue
        source = node.args[0]
        sizes = source.meta["val"].shape
        given: Any = node.args[1] if len(node.args) > 1 else range(len(sizes))
        named = [given] if isinstance(given, int) else given
        dims = [positive(d, len(sizes)) for d in named if sizes]  # a number has none, and may be asked for its last
        found[node] = node.meta.setdefault(_ASKED, dims)
        taken = [d for d in dims if isinstance(sizes[d], int) and sizes[d] == 1]
        if node.target is not aten.squeeze.dim or not taken:
            node.target = aten.squeeze.dims
            node.args = (source, taken)
    if found:
        gm.recompile()
    return found


def may_take_samples(node: Node, batch: sympy.Symbol) -> bool:
    """Whether an op of such a graph is a squeeze whose code takes a dim with one entry for each sample."""
    dims = node.meta.get(_ASKED, ())
    return any(facts.shape(node.args[0].meta["val"])[d] == batch for d in dims)  # type: ignore[union-attr]
