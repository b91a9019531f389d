"""Ops that read strides, as ops of the same values that do not.

A graph is traced on fake tensors that say how each value lies in memory.  Another trace, another kernel or another
input may lay the same value out otherwise (an FFT, a convolution of channels-last images), and then a view that was
possible is not.  What a graph means never depends on strides, so graphs are run with these ops alone.

Some kernels read memory as if their operands were contiguous, which autograd sees to with `x.contiguous()`: nothing,
and no node, where the fake tensor is.  In a graph that torch runs op by op they get contiguous ones by
`laid_out_as_read`; a compiler writes these ops in others, or lays operands out as the fake tensors lie.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported
from psg_fx.graph.history import copy_graph
from psg_fx.op_table import Strides, enter, known
from psg_fx.source import locate, provenance

aten = torch.ops.aten

enter(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, strides=Strides.RESHAPE)
enter(aten.view.dtype, aten.view_as_complex.default, strides=Strides.ROW)
enter("det", "linalg_det", "slogdet", "linalg_slogdet", "logdet", strides=Strides.DERIVATIVE)
enter("_linalg_det", "_linalg_slogdet", strides=Strides.DERIVATIVE)
enter("as_strided.default", "as_strided_copy.default", "as_strided_scatter.default", strides=Strides.MEANING)
enter(
    "native_group_norm", "native_group_norm_backward", "native_layer_norm_backward", "nll_loss2d_backward",
    "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward", "_embedding_bag_dense_backward",
    "_embedding_bag_per_sample_weights_backward", "_pdist_forward", "_pdist_backward", "_weight_norm_interface",
    "_weight_norm_interface_backward", "_linalg_check_errors", strides=Strides.CONTIGUOUS,
)  # fmt: skip
_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
enter(
    *(f"_scaled_dot_product_{kind}{way}" for kind in _ATTENTIONS for way in ("", "_backward")), strides=Strides.LAST_DIM
)


def free_of_strides(gm: GraphModule) -> GraphModule:
    """Replace, in place, every op that is possible for some strides alone by one that is possible for all."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        strides = known(node.target).strides
        if strides is Strides.RESHAPE:  # the arguments after (self, size) say how self lies in memory
            node.target, node.args = aten.reshape.default, node.args[:2]
        elif _needs_a_copy(node):
            node.replace_input_with(node.args[0], _contiguous(gm, node))
    gm.recompile()
    return gm


def laid_out_as_read(gm: GraphModule, again: bool = False) -> GraphModule:
    """The graph for torch to run: ops whose kernels do not look have operands that lie as these are read.  A copy, or
    the graph itself if it has none.

    again: it is traced on fake tensors once more, which would drop all but copies.
    """
    if not any(_laid(node) for node in gm.graph.nodes):
        return gm
    gm = copy_graph(gm)
    made: dict[tuple[Any, Node], Node] = {}
    for node in list(gm.graph.nodes):
        if (lay := _laid(node)) is None:
            continue
        for operand in node.all_input_nodes:
            if not isinstance(operand.meta.get("val"), torch.Tensor):
                continue
            if (lay, operand) not in made:
                with gm.graph.inserting_before(node):
                    made[lay, operand] = gm.graph.call_function(_copied if again else lay, (operand,))
                made[lay, operand].meta = {**provenance(node), "val": operand.meta["val"]}
            node.replace_input_with(operand, made[lay, operand])
    gm.recompile()
    return gm


def with_rows(value: torch.Tensor) -> torch.Tensor:
    """The value with neighbours of the last dim side by side."""
    return value if value.ndim == 0 or value.shape[-1] == 1 or value.stride(-1) == 1 else value.contiguous()


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format)


_LAID: dict[Strides | None, Callable[[torch.Tensor], torch.Tensor]] = {
    Strides.CONTIGUOUS: torch.Tensor.contiguous,
    Strides.LAST_DIM: with_rows,
}


def _laid(node: Node) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What lays the operands of a node out, if its kernel needs them so."""
    return _LAID.get(known(node.target).strides) if node.op == "call_function" else None


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
    return strides in (Strides.RESHAPE, Strides.MEANING) or _needs_a_copy(node)


def _needs_a_copy(node: Node) -> bool:
    """Whether its input must be a contiguous one, and is not known to be.

    Unless it is a view as numbers of the same size, the first of neighbours must lie at an even place.  A derivative
    that is there already reads the factors of the matrix as it lies.
    """
    strides = known(node.target).strides
    if strides not in (Strides.ROW, Strides.DERIVATIVE):
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    if source.target is aten.clone.default and source.kwargs.get("memory_format") is torch.contiguous_format:
        return False
    if strides is Strides.DERIVATIVE:
        returns = node.target._schema.returns  # type: ignore[union-attr]
        read = (returns[user.args[1]].name for user in node.users if user.target is operator.getitem)
        return not any(name in ("LU", "pivots") for name in read)
    other = node.args[1] if node.target is aten.view.dtype else None
    return not (isinstance(other, torch.dtype) and other.itemsize == source.meta["val"].dtype.itemsize)
