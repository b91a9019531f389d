"""Recurrent layers: their loops over time in C++ on a CPU (`psg_fx/ops/cpp/steps.h`), on CUDA with kernels for
what is elementwise in a step (`psg_fx/ops/recurrent/cells.py`).

A step of the loop of torch's ops is eight calls there and six back, of which one is the product with W.  In C++ it is
one parallel loop, and W, packed once, stays in the caches; on CUDA it is two launches there and two back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph.nodes import value_of
from psg_fx.ops.recurrent.cells import DTYPES, IN_CELLS
from psg_fx.ops.recurrent.here import HERE, LIBRARIES
from psg_fx.planner.cost import Device
from psg_fx.torch_private import native

_OWN = {"cpu": (HERE, DTYPES[:1]), "cuda": (IN_CELLS, DTYPES)}
"""Kind of device -> the ops that take the place of loops of torch's ops, and for which dtypes."""


def with_own_loops(gm: GraphModule, device: str) -> None:
    """Put loops of psg_fx's own in the place of those that they suit."""
    for node in _loops(gm, device):
        node.target = _OWN[device][0][node.target]


def begin_own_loops(gm: GraphModule, device: Device) -> None:
    """Begin to compile the loops in C++ that a captured graph will have: passes come first, and leave a core idle."""
    if device.name == "cpu" and device.compiled and device.own_ops:
        for node in _loops(gm, device.name):
            native.begin(LIBRARIES[node.target])  # type: ignore[index]


def _loops(gm: GraphModule, device: str) -> list[Node]:
    """The loops that one of psg_fx's own suits."""
    ops, dtypes = _OWN.get(device, ({}, ()))
    return [node for node in gm.graph.nodes if node.target in ops and _suits(node, dtypes)]


def _suits(node: Node, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether all is of one dtype of these, and no state is projected."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    projected = dict(zip(names, node.args, strict=True)).get("projection") is not None
    found = {value_of(tensor).dtype for tensor in node.all_input_nodes}
    return not projected and len(found) == 1 and found <= set(dtypes)
