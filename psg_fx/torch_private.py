"""Every private torch API that psg_fx uses, in one place, with what it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.traceback import preserve_node_meta

aten = torch.ops.aten

__all__ = ["autocast_key", "partition", "preserve_node_meta", "rnn_decompositions"]


def rnn_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Torch's own decompositions of the recurrent layers, which unroll them into linear layers and pointwise ops."""
    ops = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
    return dict(get_decompositions(ops))  # type: ignore[arg-type]


def partition(joint: GraphModule, num_fwd_outputs: int) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph with placeholders `primals_*` and `tangents_*` into a forward and a backward graph, with the
    fewest bytes saved between them (Chen et al. 2016, arXiv:1604.06174, by min-cut).
    """
    forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_fwd_outputs)
    return forward, backward


def autocast_key(device_type: str) -> tuple[bool, torch.dtype] | None:
    """The autocast state that a capture depends on."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return True, torch.get_autocast_dtype(device_type)
