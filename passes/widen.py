"""widen: a matrix product of half-precision values that is wanted in float32 is added up in float32 by the device.

Gram matrices and gradients are kept in float32, and on a CPU their operands are made float32 first. A CUDA device
multiplies bfloat16 and float16 as they are and adds up in float32: the products are exact there, since 11 bits times 11
bits are 22 of 24, so the result is the same, at the rate of its matrix units and without the copies. Likewise
gradients that are results are not rounded to half precision only to be made float32 again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.stages import Stage

from .runner import graph_pass

aten = torch.ops.aten

_INTO = {aten.bmm.default: aten.bmm.dtype, aten.mm.default: aten.mm.dtype}
"""Matrix products, and those that are told the dtype of their result."""

_HALF = (torch.float16, torch.bfloat16)


@graph_pass("widen", before=Stage.TIDIED, after=Stage.TIDIED)
def widen(gm: GraphModule, device: str) -> GraphModule:
    """After: no operand of a product is made float32 only for it; a product is not rounded between."""
    if device != "cuda":
        return gm
    for node in list(gm.graph.nodes):
        if node.target in _INTO:
            _take_half_operands(gm, node)
    for node in reversed(list(gm.graph.nodes)):
        if node.target is aten._to_copy.default and not node._erased:
            _write_in_full(gm, node)
    gm.graph.eliminate_dead_code()
    return gm


def _take_half_operands(gm: GraphModule, product: Node) -> None:
    """bmm(float32(a), float32(b)) as the product of a and b into float32."""
    chains = [_chain(operand) for operand in product.args]
    if any(chain is None for chain in chains):
        return
    dtypes = {chain[0].args[0].meta["val"].dtype for chain in chains if chain}
    if len(dtypes) != 1 or not dtypes <= set(_HALF) or product.meta["val"].dtype is not torch.float32:
        return
    with gm.graph.inserting_before(product):
        halves = [_again(gm, chain[1:], chain[0].args[0]) for chain in chains if chain]
        new = gm.graph.call_function(_INTO[product.target], (*halves, torch.float32))
    new.meta = dict(product.meta)
    name = product.name
    product.replace_all_uses_with(new)
    gm.graph.erase_node(product)
    new._rename(name)


def _write_in_full(gm: GraphModule, cast: Node) -> None:
    """float32(bmm(a, b)) as the product into float32, where it is a result; what is only read again is shorter in half
    precision.
    """
    result = any(user.op == "output" for user in cast.users)
    if not result or not _only_changes_dtype(cast) or cast.meta["val"].dtype is not torch.float32:
        return
    views, product = [], cast.args[0]
    while is_view(product) and len(product.users) == 1 and len(product.all_input_nodes) == 1:
        views.append(product)
        product = product.all_input_nodes[0]
    named = any(facts.fact(node).contracts for node in (product, *views))
    if product.target not in _INTO or len(product.users) != 1 or not named:
        return
    if any(operand.meta["val"].dtype not in _HALF for operand in product.args):
        return
    with gm.graph.inserting_before(product):
        new = gm.graph.call_function(_INTO[product.target], (*product.args, torch.float32))
    new.meta = dict(product.meta)
    new.meta["val"] = _with_dtype(product.meta["val"], torch.float32)
    with gm.graph.inserting_before(cast):
        wide = _again(gm, views[::-1], new)
    name = product.name
    cast.replace_all_uses_with(wide)
    for node in (cast, *views, product):
        gm.graph.erase_node(node)
    new._rename(name)


def _chain(node: Any) -> list[Node] | None:
    """The cast from which a value comes through views, then these views; None if it comes of none."""
    views: list[Node] = []
    while isinstance(node, Node) and is_view(node) and len(node.all_input_nodes) == 1:
        views.append(node)
        node = node.all_input_nodes[0]
    return [node, *views[::-1]] if isinstance(node, Node) and _only_changes_dtype(node) else None


def _only_changes_dtype(node: Node) -> bool:
    """Whether it is a cast whose result lies in memory as its argument does, apart from the size of an element."""
    if node.target is not aten._to_copy.default or not set(node.kwargs) <= {"dtype", "layout", "device"}:
        return False
    old, new = node.args[0].meta["val"], node.meta["val"]
    if old.device != new.device:
        return False
    return bool(
        facts.shape(old) == facts.shape(new) and [str(s) for s in old.stride()] == [str(s) for s in new.stride()]
    )


def _again(gm: GraphModule, views: list[Node], start: Node) -> Node:
    """The same views of another value."""
    for view in views:
        made = gm.graph.call_function(view.target, (start, *view.args[1:]), view.kwargs)
        made.meta = dict(view.meta)
        made.meta["val"] = _with_dtype(view.meta["val"], start.meta["val"].dtype)
        start = made
    return start


def _with_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
