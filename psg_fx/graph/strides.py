"""Ops that read strides, as ops of the same values that do not.

A graph is traced on fake tensors that say how each value lies in memory.  Another trace, another kernel or another
input may lay the same value out otherwise (an FFT, a convolution of channels-last images), and then a view that was
possible is not.  What a graph means never depends on strides, so graphs are run with these ops alone.
"""

from __future__ import annotations

import contextlib

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.op_table import Strides, enter, known
from psg_fx.source import locate, provenance

aten = torch.ops.aten

enter(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, strides=Strides.RESHAPE)
enter(aten.view.dtype, aten.view_as_complex.default, strides=Strides.ROW)
enter("as_strided.default", "as_strided_copy.default", "as_strided_scatter.default", strides=Strides.MEANING)


def free_of_strides(gm: GraphModule) -> GraphModule:
    """Replace, in place, every op that is possible for some strides alone by one that is possible for all."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        strides = known(node.target).strides
        if strides is Strides.RESHAPE:  # the arguments after (self, size) say how self lies in memory
            node.target, node.args = aten.reshape.default, node.args[:2]
        elif strides is Strides.ROW and _needs_a_row(node):
            node.replace_input_with(node.args[0], _contiguous(gm, node))
    gm.recompile()
    return gm


def _contiguous(gm: GraphModule, reader: Node) -> Node:
    """The first argument of `reader`, contiguous and at the start of its memory."""
    with gm.graph.inserting_before(reader):
        made = gm.graph.call_function(aten.clone.default, reader.args[:1], {"memory_format": torch.contiguous_format})
    made.meta = provenance(reader)
    value = reader.args[0].meta["val"]  # type: ignore[union-attr]
    with getattr(value, "fake_mode", contextlib.nullcontext()):
        made.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    return made


def refuse_strides(gm: GraphModule) -> None:
    """Raise NotYetSupported if the code takes memory for what it is: another trace may lay values out otherwise."""
    for node in gm.graph.nodes:
        if known(node.target).strides is Strides.MEANING:
            raise NotYetSupported(
                f"{str(node.target).removesuffix('.default')} is not supported", where=locate(node),
                why="it reads memory by strides, and where a value lies in memory is no part of a captured graph",
                fix="use view, permute, slice or unfold",
            )  # fmt: skip


def reads_strides(node: Node) -> bool:
    """Whether the op is impossible, or means something else, for other strides of its input."""
    strides = known(node.target).strides
    return strides is not None and (strides is not Strides.ROW or _needs_a_row(node))


def _needs_a_row(node: Node) -> bool:
    """Unless it is a view as numbers of the same size, the first of neighbours must lie at an even place."""
    source = node.args[0]
    assert isinstance(source, Node)
    if source.target is aten.clone.default and source.kwargs.get("memory_format") is torch.contiguous_format:
        return False
    other = node.args[1] if node.target is aten.view.dtype else None
    return not (isinstance(other, torch.dtype) and other.itemsize == source.meta["val"].dtype.itemsize)
