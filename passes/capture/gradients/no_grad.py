"""Regions under `torch.no_grad()` in an exported graph."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from psg_fx.torch_private.ops import writes, written_arguments

aten = torch.ops.aten


def detach_no_grad_regions(gm: GraphModule) -> None:
    """`with torch.no_grad():` regions arrive as sub-graphs.  Detach what leaves them, so that differentiation stops
    there as the user asked, and put them inline: decomposition would, and lose their lines.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, region = node.args[0], getattr(gm, node.args[1].target)
        detach_no_grad_regions(region)
        if not enabled:
            for inner in region.graph.nodes:
                _write_detached(inner)
            output = region.graph.output_node()
            with region.graph.inserting_before(output):
                values = pytree.tree_map_only(torch.fx.Node, partial(_detached, region.graph), output.args[0])
            output.args = (values,)
            region.recompile()
        _inline(gm, node, region)


def _inline(gm: GraphModule, node: torch.fx.Node, region: GraphModule) -> None:
    """A region's nodes in the place of the one that calls it; unless it has modules of its own."""
    if region.graph.find_nodes(op="get_attr") or any(user.target is not operator.getitem for user in node.users):
        return
    operands = dict(zip(region.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    with gm.graph.inserting_before(node):
        results: Any = gm.graph.graph_copy(region.graph, operands)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    gm.recompile()


def _write_detached(node: torch.fx.Node) -> None:
    """What a node of such a region writes has no gradient either, and not only what the region returns: in
    `with torch.no_grad(): target[:, 0] = h`, the target is a tensor from outside.
    """
    if not writes(node.target):
        return
    op: Any = node.target
    written = written_arguments(op)
    with node.graph.inserting_before(node):
        read = partial(pytree.tree_map_only, torch.fx.Node, partial(_detached, node.graph))
        node.args = tuple(v if w else read(v) for v, w in zip(node.args, written, strict=False))
        named = {a.name: w for a, w in zip(op._schema.arguments, written, strict=True)}
        node.kwargs = {name: v if named[name] else read(v) for name, v in node.kwargs.items()}


def _detached(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    held = value.meta.get("val")
    if not isinstance(held, torch.Tensor) or not (held.is_floating_point() or held.is_complex()):
        return value  # nothing to detach: a mask stays the one that others are compared with
    node = graph.call_function(aten.detach.default, (value,))
    node.meta = {key: said for key, said in value.meta.items() if key != "unbacked_bindings"}
    return node
