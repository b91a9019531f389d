"""beside: alike products that do not wait for each other are one product of operands that lie side by side.

    x_1[b,i,t] ȳ_1[b,t,o],  x_2[b,i,t] ȳ_2[b,t,o], ..   ->   x[l,b,i,t] ȳ[l,b,t,o]

The layers of a stage of a convolutional network have equal shapes, and their products take less time than their
launches.  Operands that are written for a product anyway (patches of an image, what is multiplied by the weights of the
samples) are written side by side at once, in one kernel in place of one each; others are copied.  Such a kernel asks of
each element which operand it is of, as often as there are operands, so large ones are written more slowly than apart:
the device's rates weigh that against the launches that are saved.  Products of which nothing is written anyway, as
those of linear layers, stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.nodes import call, in_order, output, put_in_place, written_before
from psg_fx.graph.order import is_reshaped
from psg_fx.graph.same_op import merge_equal
from psg_fx.graph.stages import Stage
from psg_fx.ops.products.tile_products import is_tiled
from psg_fx.planner.cost import SIDE_BY_SIDE, Device
from psg_fx.planner.plan import PLAN
from psg_fx.tensors import is_contiguous, product

from .runner import graph_pass

aten = torch.ops.aten

_OF_MATRICES = {aten.mm.default: aten.bmm.default, aten.mm.dtype: aten.bmm.dtype}
_BATCHED = {aten.bmm.default, aten.bmm.dtype}
_WRITTEN = {aten.clone.default, aten.constant_pad_nd.default, aten.mul.Tensor, aten._to_copy.default}
_INLINE = {aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.sum.dim_IntList}
"""Readers that compute a value where they read it."""

_MOST = 8
"""Operands that inductor writes side by side in one kernel."""


@graph_pass("beside", before=Stage.TIDIED, after=Stage.TIDIED)
def beside(gm: GraphModule, device: Device, size: int) -> GraphModule:
    """After: alike products of this plan are one where that is the faster way for `size` samples.

    Not under a budget of memory, which was counted for one layer after the other.
    """
    if not device.launches or PLAN.of(gm).need:
        return gm
    products = [node for node in gm.graph.nodes if _is_product(node)]
    for members in _alike(gm, products):
        if _pays(gm, members, set(products), device, size):
            _as_one(gm, members)
    in_order(gm)
    merge_equal(gm)
    gm.graph.eliminate_dead_code()
    return gm


def _is_product(node: Node) -> bool:
    """Whether it is a product of two matrices, or of two for each sample, that a plan has written."""
    known = node.target in _OF_MATRICES or node.target in _BATCHED or is_tiled(node)
    if not known or node.meta.get("psg_fx_pass") is None:
        return False
    unknown = [sum(bool(size.free_symbols) for size in facts.shape(o.meta["val"])) for o in _operands(node)]
    rest = [size for o in _operands(node) for size in facts.shape(o.meta["val"])[1:]]
    return max(unknown) <= 1 and (node.target in _OF_MATRICES or not any(size.free_symbols for size in rest))


def _alike(gm: GraphModule, products: Sequence[Node]) -> Iterator[list[Node]]:
    """Products of equal shapes, none of which waits for another: as many products lie on the way to each."""
    depth: dict[Node, int] = {}
    groups: dict[Any, list[Node]] = {}
    every = set(products)
    for node in gm.graph.nodes:
        depth[node] = max((depth[n] + (n in every) for n in node.all_input_nodes), default=0)
    for node in products:
        values = [(facts.shape(o.meta["val"]), o.meta["val"].dtype) for o in _operands(node)]
        others = map(str, node.args[2:])
        groups.setdefault((depth[node], node.target, *others, *values), []).append(node)
    for found in groups.values():
        for start in range(0, len(found), _MOST):
            if len(members := found[start : start + _MOST]) > 1:
                yield members


def _pays(gm: GraphModule, members: Sequence[Node], products: Collection[Node], device: Device, size: int) -> bool:
    """Whether the launches that are saved take longer than what writing side by side takes beyond writing apart."""
    batch, others = facts.graph_facts(gm).batch, PLAN.of(gm).size
    fewer = len(members) - 1
    saved, longer, free = fewer, 0.0, 0
    for operands in zip(*map(_operands, members), strict=True):
        value = operands[0].meta["val"]
        count = product(facts.shape(value)) * len(operands)
        elements = float(count.subs({symbol: size if symbol == batch else others for symbol in count.free_symbols}))
        apart = 2 * elements * value.dtype.itemsize / device.bandwidth
        together = max(apart, device.extra.get(SIDE_BY_SIDE, 0.0) * len(operands) * elements)
        if all(_is_written_for(operand, products) for operand in operands):
            saved, longer, free = saved + fewer, longer + together - apart, free + 1
        else:
            saved, longer = saved - 1, longer + together
    return free > 0 and saved * device.launch > longer


def _is_written_for(operand: Node, products: Collection[Node]) -> bool:
    """Whether it is a value that only products have written to memory."""
    while is_view(operand) or is_reshaped(operand):
        operand = operand.all_input_nodes[0]
    return operand.target in _WRITTEN and all(
        reader in products or reader.target in _INLINE for reader in _readers(operand)
    )


def _readers(node: Node) -> Iterator[Node]:
    """What reads it or a view of it."""
    for user in node.users:
        if is_view(user) or is_reshaped(user) or user.target is aten.clone.default:
            yield from _readers(user)
        else:
            yield user


def _as_one(gm: GraphModule, members: Sequence[Node]) -> None:
    """Replace products by the parts of one."""
    first: Any = members[0]
    with written_before(gm.graph.output_node(), {"psg_fx_pass": "beside"}):
        operands = [_side_by_side(gm, found, first) for found in zip(*map(_operands, members), strict=True)]
        whole = call(gm, _OF_MATRICES.get(first.target, first.target), *operands, *first.args[2:])
        for k, member in enumerate(members):
            shown = list(member.users) if isinstance(member.meta["val"], (tuple, list)) else [member]
            for old in shown:
                value = whole if old is member else output(gm, whole, old.args[1])
                if first.target not in _OF_MATRICES:
                    value = call(gm, aten.reshape.default, value, [len(members), -1, *value.meta["val"].shape[1:]])
                put_in_place(old, call(gm, aten.select.int, value, 0, k))


def _side_by_side(gm: GraphModule, operands: Sequence[Node], like: Node) -> Node:
    """[l·b, ..] of operands [b, ..] of products for each sample, [l, ..] of those of matrices."""
    values: Any = [_unshaped(operand) for operand in operands]
    if len({facts.shape(value.meta["val"]) for value in values}) > 1:
        values = operands
    whole = call(gm, aten.cat.default, list(values))
    shape: list[Any] = list(operands[0].meta["val"].shape)
    known = [s if isinstance(s, int) else -1 for s in shape]
    return call(
        gm, aten.reshape.default, whole, [len(operands), *known] if like.target in _OF_MATRICES else [-1, *shape[1:]]
    )


def _operands(node: Node) -> list[Node]:
    found: Any = node.args[:2]
    return [operand for operand in found if isinstance(operand, Node)]


def _unshaped(node: Node) -> Node:
    """The value of which it is the elements, in their order."""
    while is_reshaped(node) and all(is_contiguous(n.meta["val"]) for n in (node, _operands(node)[0])):
        node = _operands(node)[0]
    return node
