"""Ops that read strides, as ops of the same values that do not.

A graph is traced on fake tensors that say how each value lies in memory.  Another trace, another kernel or another
input may lay the same value out otherwise (an FFT, a convolution of channels-last images), and then a view that was
possible is not.  What a graph means never depends on strides, so graphs are run with these ops alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.source import locate

aten = torch.ops.aten

_RESHAPES: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten._reshape_alias.default: aten.reshape.default,
}
"""Possible for some strides alone -> for all of them.  The arguments after (self, size) say how self lies in memory."""

_IN_A_ROW = (aten.view.dtype, aten.view_as_complex.default)
"""Neighbours in the last dim must be neighbours in memory, and the first of them at an even place."""

_ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom")
"""What a node says of the code that it comes from."""

_BY_STRIDES = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
"""What they mean depends on strides."""


def free_of_strides(gm: GraphModule) -> GraphModule:
    """Replace, in place, every op that is possible for some strides alone by one that is possible for all."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _RESHAPES:
            node.target, node.args = _RESHAPES[node.target], node.args[:2]
        elif _needs_a_row(node):
            node.replace_input_with(node.args[0], _contiguous(gm, node))
    gm.recompile()
    return gm


def _contiguous(gm: GraphModule, reader: Node) -> Node:
    """The first argument of `reader`, contiguous and at the start of its memory."""
    with gm.graph.inserting_before(reader):
        made = gm.graph.call_function(aten.clone.default, reader.args[:1], {"memory_format": torch.contiguous_format})
    made.meta = {key: reader.meta[key] for key in _ORIGINS if key in reader.meta}
    value = reader.args[0].meta["val"]  # type: ignore[union-attr]
    with getattr(value, "fake_mode", contextlib.nullcontext()):
        made.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    return made


def refuse_strides(gm: GraphModule) -> None:
    """Raise NotYetSupported if the code takes memory for what it is: another trace may lay values out otherwise."""
    for node in gm.graph.nodes:
        if node.target in _BY_STRIDES:
            raise NotYetSupported(
                f"{str(node.target).removesuffix('.default')} is not supported", where=locate(node),
                why="it reads memory by strides, and where a value lies in memory is no part of a captured graph",
                fix="use view, permute, slice or unfold",
            )  # fmt: skip


def reads_strides(node: Node) -> bool:
    """Whether the op is impossible, or means something else, for other strides of its input."""
    return node.target in _RESHAPES or node.target in _BY_STRIDES or _needs_a_row(node)


def _needs_a_row(node: Node) -> bool:
    if node.target not in _IN_A_ROW:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    if source.target is aten.clone.default and source.kwargs.get("memory_format") is torch.contiguous_format:
        return False
    other = node.args[1] if node.target is aten.view.dtype else None
    return not (isinstance(other, torch.dtype) and other.itemsize == source.meta["val"].dtype.itemsize)
