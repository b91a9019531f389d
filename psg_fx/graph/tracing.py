"""Tracing plain torch functions into functional graphs with the batch size as a symbol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from psg_fx.graph.strides import free_of_strides
from psg_fx.torch_private.graphs import traced_without_code
from psg_fx.torch_private.ops import writes
from psg_fx.torch_private.tracer import trace_fakes


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], corrected: Callable[[GraphModule], None] | None = None,
    **options: Any,
) -> GraphModule:  # fmt: skip
    """`function(*arguments)` as a graph; fake arguments keep their symbols, and no others are made.

    Some formulas of autograd and some composite kernels write into tensors that they have just made; the graph has the
    functional ops in their place.  corrected: changes what was recorded.
    options: further ones of `make_fx`.
    """
    with traced_without_code():
        traced = trace_fakes(function, arguments, **options)
        if corrected is not None:
            corrected(traced)
        if any(writes(node.target) for node in traced.graph.nodes):
            again = torch.func.functionalize(Interpreter(free_of_strides(traced)).run)
            with torch.no_grad():  # what was differentiated is there
                traced = trace_fakes(again, arguments, **options)
    return traced
