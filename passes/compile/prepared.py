"""A lowered graph as a compiler takes it."""

from __future__ import annotations

import operator
from typing import Any, cast

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.history import copy_graph
from psg_fx.graph.strides import free_of_strides

from .additions import add_rows_by_scatter
from .pools import pool_by_vectors

aten = torch.ops.aten


def written_out(gm: GraphModule, backend: str = "inductor", device: str = "cpu") -> GraphModule:
    """A copy of a lowered graph as a compiler takes it: no strides, no sizes as arguments, nothing that inductor gets
    wrong.
    """
    gm = free_of_strides(copy_graph(gm))
    _read_sizes_from_tensors(gm)
    _count_by_sizes(gm)
    if backend == "inductor" and device == "cpu":
        add_rows_by_scatter(gm)
        pool_by_vectors(gm)
    gm.recompile()
    return gm


def erase_numbers(gm: GraphModule) -> frozenset[int]:
    """Erase the placeholders of numbers that nothing reads; which arguments these are."""
    nodes = facts.placeholders(gm)
    found = [i for i, n in enumerate(nodes) if not n.users and not isinstance(n.meta["val"], torch.Tensor)]
    for i in found:
        gm.graph.erase_node(nodes[i])
    gm.recompile()
    return frozenset(found)


def sizes_of(node: Node) -> tuple[sympy.Expr, ...]:
    """The sizes of an input; none of a number."""
    value = node.meta["val"]
    return facts.shape(value) if isinstance(value, torch.Tensor) else ()


def _read_sizes_from_tensors(gm: GraphModule) -> None:
    """Read the sizes that a backward graph takes as numbers from its tensors: a number is compiled as a constant."""
    nodes = facts.placeholders(gm)
    places = {size: (node, dim) for node in nodes for dim, size in enumerate(sizes_of(node))}
    for node in nodes:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and facts.expr(value) in places:
            with gm.graph.inserting_after(nodes[-1]):
                size = gm.graph.call_function(aten.sym_size.int, places[facts.expr(value)])
            node.replace_all_uses_with(size)


def _count_by_sizes(gm: GraphModule) -> None:
    """How many elements a tensor has, as the product of its sizes: Dynamo of torch 2.11 does not know `sym_numel`."""
    for node in list(gm.graph.nodes):
        if node.target is not aten.sym_numel.default:
            continue
        (tensor,), count = node.all_input_nodes, cast("Any", 1)
        with gm.graph.inserting_before(node):
            for dim in range(tensor.meta["val"].ndim):
                size = gm.graph.call_function(aten.sym_size.int, (tensor, dim))
                count = gm.graph.call_function(operator.mul, (count, size)) if dim else size
        node.replace_all_uses_with(count)
        gm.graph.erase_node(node)
