"""compile: a lowered graph becomes a callable on flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

Flat = Callable[..., Sequence[Any]]


_CPU_OPTIONS = {"layout_optimization": False}
"""Inductor's defaults that cost time on CPU: channels-last convolutions transpose activations and weights at every call
(docs/design/cpu.md; bench/calibrate.py measures it)."""


def compile_graph(
    gm: GraphModule, backend: str, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None, device: str
) -> Flat:
    """`torch.compile(gm)`; `backend="eager"` runs the graph as it is.  The user's options come before ours."""
    if backend == "eager":
        return gm
    if backend == "inductor" and device == "cpu" and mode is None:
        options = _CPU_OPTIONS | (options or {})
    compiled: Flat = torch.compile(gm, backend=backend, mode=mode, options=options, dynamic=dynamic, fullgraph=True)
    return compiled
