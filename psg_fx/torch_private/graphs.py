"""Graph modules: how their code is written, and how they are split."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.node import _side_effectful_functions, has_side_effect


def module_without_code(root: nn.Module | dict[str, Any], graph: Graph, name: str = "GraphModule") -> GraphModule:
    """A graph module whose Python code is written when it is first asked for: most stages only hold a graph."""
    return _LazyGraphModule(root, graph, name)


def write_code(gm: GraphModule) -> None:
    """Have the code written if it is not: Dynamo does not look into what would write it."""
    _LazyGraphModule.force_recompile(gm)


def traced_without_code() -> contextlib.AbstractContextManager[None]:
    """Let what is traced be such modules."""
    return _use_lazy_graph_module(True)


@contextlib.contextmanager
def unread_ops() -> Iterator[Callable[[Any], None]]:
    """Yields what is told of ops that stay in a graph where nothing reads them, until this closes.  Torch has one set
    of these for the process.
    """
    kept = set()

    def keep(op: Any) -> None:
        kept.add(op)
        has_side_effect(op)

    try:
        yield keep
    finally:
        _side_effectful_functions.difference_update(kept)


def partition(joint: GraphModule, num_fwd_outputs: int) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph with placeholders `primals_*` and `tangents_*` into a forward and a backward graph, with the
    fewest bytes saved between them (Chen et al. 2016, arXiv:1604.06174, by min-cut).
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # slow to import, and seldom used

    forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_fwd_outputs)
    return forward, backward
