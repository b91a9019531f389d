"""compile: a lowered graph becomes a callable on flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

Flat = Callable[..., Sequence[Any]]


def compile_graph(gm: GraphModule, backend: str, mode: str | None, options: Any, dynamic: bool | None) -> Flat:
    """`torch.compile(gm)`; `backend="eager"` runs the graph as it is."""
    if backend == "eager":
        return gm
    compiled: Flat = torch.compile(gm, backend=backend, mode=mode, options=options, dynamic=dynamic, fullgraph=True)
    return compiled
