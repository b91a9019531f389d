"""compile: a lowered graph becomes a callable on flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .runner import copy_graph

aten = torch.ops.aten
Flat = Callable[..., Sequence[Any]]


_CPU_OPTIONS = {"layout_optimization": False}
"""Inductor's defaults that cost time on CPU: channels-last convolutions transpose activations and weights at every call
(docs/design/cpu.md; bench/calibrate.py measures it)."""


def compile_graph(
    gm: GraphModule, backend: str, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None, device: str
) -> Flat:
    """`torch.compile(gm)`; `backend="eager"` runs the graph as it is.  The user's options come before ours."""
    if backend == "eager":
        return _with_reshapes(gm)
    if backend == "inductor" and device == "cpu" and mode is None:
        options = _CPU_OPTIONS | (options or {})
    compiled: Flat = torch.compile(gm, backend=backend, mode=mode, options=options, dynamic=dynamic, fullgraph=True)
    return compiled


def _with_reshapes(gm: GraphModule) -> GraphModule:
    """Views as reshapes: a kernel may lay out its result otherwise than the fake one said that the graph was traced
    with (a convolution of channels-last images), and then a view that was possible is not.
    """
    changed = copy_graph(gm)
    for node in changed.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    changed.recompile()
    return changed
