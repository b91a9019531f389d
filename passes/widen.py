"""widen: a matrix product of half-precision values that is wanted in float32 is added up in float32 by the device.

Gram matrices and gradients are kept in float32, and on a CPU their operands are made float32 first. A CUDA device
multiplies bfloat16 and float16 as they are and adds up in float32: the products are exact there, since 11 bits times 11
bits are 22 of 24, so the result is the same, at the rate of its matrix units and without the copies. Likewise
gradients that are results are not rounded to half precision only to be made float32 again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.nodes import put_in_place
from psg_fx.graph.same_op import merge_equal
from psg_fx.graph.stages import Stage
from psg_fx.tensors import ALIGNED, HALF

from .runner import graph_pass

aten = torch.ops.aten

_INTO = {aten.bmm.default: aten.bmm.dtype, aten.mm.default: aten.mm.dtype}
"""Matrix products, and those that are told the dtype of their result."""


@graph_pass("widen", before=Stage.TIDIED, after=Stage.TIDIED)
def widen(gm: GraphModule, device: str) -> GraphModule:
    """After: no operand of a product is made float32 only for it; a gradient is not rounded on its way out."""
    if device != "cuda":
        return gm
    for node in list(gm.graph.nodes):
        if node.target in _INTO:
            _take_half_operands(gm, node)
    for node in list(gm.graph.nodes):
        if any(user.op == "output" for user in node.users) and _only_changes_dtype(node):
            _write_in_full(gm, node)
    merge_equal(gm)  # two products of one operand have its views twice
    gm.graph.eliminate_dead_code()
    return gm


def _take_half_operands(gm: GraphModule, product: Node) -> None:
    """bmm(float32(a), float32(b)) as the product of a and b into float32."""
    (a, a_views), (b, b_views) = (_before_cast(operand) for operand in _operands(product))
    if _dtype(product) is not torch.float32 or _dtype(a) is not _dtype(b) or _dtype(a) not in HALF:
        return
    with gm.graph.inserting_before(product):
        left, right = _again(gm, a_views, a), _again(gm, b_views, b)
        _replace(gm, product, _in_whole_columns(gm, _op(product), left, right, product.meta["val"]))


def _in_whole_columns(gm: GraphModule, op: OpOverload, left: Node, right: Node, result: torch.Tensor) -> Node:
    """The product of two nodes in float32, computed with zeros for the columns to the next multiple."""
    columns: Any = result.shape[-1]  # an int, or a symbol
    lacking = -columns % ALIGNED if isinstance(columns, int) else 0
    if not lacking:
        return _call(gm, result, _INTO[op], left, right, torch.float32)
    padded, wide = ([*value.shape[:-1], columns + lacking] for value in (right.meta["val"], result))
    right = _call(gm, right.meta["val"].new_empty(padded), aten.constant_pad_nd.default, right, [0, lacking])
    found = _call(gm, result.new_empty(wide), _INTO[op], left, right, torch.float32)
    part = found.meta["val"].narrow(-1, 0, columns)
    return _call(gm, part, aten.slice.Tensor, found, result.ndim - 1, 0, columns)


def _write_in_full(gm: GraphModule, cast: Node) -> None:
    """float32(bmm(a, b)) as the product into float32; what is only read again is shorter in half precision."""
    product, views = _through_views(_operands(cast)[0])
    contraction = any(facts.fact(node).contracts for node in (product, *views))
    read_elsewhere = any(len(node.users) != 1 for node in (product, *views))
    if product.target not in _INTO or read_elsewhere or not contraction or _dtype(product) not in HALF:
        return
    with gm.graph.inserting_before(cast):
        value = _with_dtype(product.meta["val"], torch.float32)
        wide = _call(gm, value, _INTO[_op(product)], *_operands(product), torch.float32)
        wide.meta = product.meta | wide.meta
        _replace(gm, cast, _again(gm, views, wide))


def _before_cast(node: Node) -> tuple[Node, list[Node]]:
    """The value that was cast to make this one, through views, and these views; itself if none was."""
    start, views = _through_views(node)
    return (_operands(start)[0], views) if _only_changes_dtype(start) else (node, [])


def _through_views(node: Node) -> tuple[Node, list[Node]]:
    """The value of which this one is a view of views, and these."""
    views: list[Node] = []
    while is_view(node) and len(node.all_input_nodes) == 1:
        views.insert(0, node)
        node = node.all_input_nodes[0]
    return node, views


def _only_changes_dtype(node: Node) -> bool:
    """Whether it is a cast to float32 that leaves the layout as it is."""
    if node.target is not aten._to_copy.default or not set(node.kwargs) <= {"dtype", "layout", "device"}:
        return False
    old, new = _operands(node)[0].meta["val"], node.meta["val"]
    placed = [[str(s) for s in (value.device, *value.shape, *value.stride())] for value in (old, new)]
    return new.dtype is torch.float32 and placed[0] == placed[1]


def _again(gm: GraphModule, views: list[Node], start: Node) -> Node:
    """The same views of another value."""
    for view in views:
        made = gm.graph.call_function(_op(view), (start, *view.args[1:]), view.kwargs)
        made.meta = view.meta | {"val": _with_dtype(view.meta["val"], _dtype(start))}
        start = made
    return start


def _call(gm: GraphModule, value: torch.Tensor, op: OpOverload, *arguments: Any) -> Node:
    made = gm.graph.call_function(op, arguments)
    made.meta["val"] = value
    return made


def _replace(gm: GraphModule, old: Node, new: Node) -> None:
    """Put one node in the place of another, under its name and with its facts, and remove that."""
    put_in_place(old, new)
    gm.graph.erase_node(old)


def _operands(node: Node) -> list[Node]:
    return [a for a in node.args if isinstance(a, Node)]


def _op(node: Node) -> OpOverload:
    assert isinstance(node.target, OpOverload)
    return node.target


def _dtype(node: Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found


def _with_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
