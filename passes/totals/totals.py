"""totals: norms of the whole model, and sums of small gradients, are added up together, not parameter by parameter.

    Σ_p Σ_k g_p[b, k]²  =  Σ_k [ .. g_p .. ][b, k]²  +  Σ_k [ .. Σ_l g_q[b, k, l]² .. ][b, k]

A reduction of `[B, n]` to `[B]` is a kernel of its own, two where n is large, and a model has one for each of its
parameters.  In their place small gradients (of biases, of scales of norms) lie side by side, where the kernels that
make them write them; and so do the sums of the rows of large ones.  On a CUDA device the weighted sums of small
gradients are one product with what lies there, too, and the results are slices of it; those of large ones that are
stored anyway are written by a kernel of psg_fx, several of one size at once (`psg_fx/ops/products/weighted_sums.py`).

Norms that are wanted by parameter, and those that are no sums of squares (of Gram matrices), are left as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import in_order
from psg_fx.graph.same_op import merge_equal
from psg_fx.graph.stages import Stage
from psg_fx.ops.products import patch_products
from psg_fx.ops.products.tile_products import is_tiled
from psg_fx.planner.cost import Device
from psg_fx.planner.plan import PLAN
from psg_fx.tensors import product

from ..runner import graph_pass
from .weighted import adds_samples, as_product, by_kernel, origin, sums_of, sums_together, width, written

aten = torch.ops.aten

_ROW = 32
"""Elements of which the sum is worth writing down: of n squares at most n / 32 numbers are."""

_READ_AT_ONCE = 8
"""Tensors that inductor reads side by side in the kernel that sums them, and does not copy to lie so."""


@graph_pass("totals", before=Stage.TIDIED, after=Stage.TIDIED)
def totals(gm: GraphModule, device: Device, size: int) -> GraphModule:
    """After: norms of the whole model are sums over elements and rows of gradients that lie side by side, where that is
    the faster way for `size` samples on the device.
    """
    batch, groups = facts.graph_facts(gm).batch, PLAN.of(gm).size

    def is_cheap(*values: torch.Tensor) -> bool:
        """Whether writing and reading them takes less than the launch of a kernel."""
        whole = sum(product(facts.shape(value)) * value.dtype.itemsize for value in values)
        known = {symbol: size if symbol == batch else groups for symbol in whole.free_symbols}
        return 2 * int(whole.subs(known)) <= device.launch * device.bandwidth

    sums = [node for node in gm.graph.nodes if adds_samples(node)]
    for total in sums:
        if _stacked(total):
            _norms_together(gm, total, is_cheap, on_cuda=device.name == "cuda")
    for total in sums if device.name == "cpu" else ():
        as_product(gm, total, is_cheap)
    if device.name == "cuda" and device.compiled and device.own_ops:
        by_kernel(gm, sums, is_cheap)
    in_order(gm)
    merge_equal(gm)
    gm.graph.eliminate_dead_code()
    return gm


@dataclass(frozen=True)
class _Norm:
    """A squared norm that is a sum of squares, [B]: its last node, the reduction, the squares, and what is squared."""

    last: Node
    reduction: Node
    squares: Node
    value: Node


def _stacked(total: Node) -> list[Node]:
    """The nodes whose sum it is, as often as they are in it."""
    stack = total.all_input_nodes[0]
    if stack.target is not aten.stack.default or len(stack.args) > 1:
        return []
    (nodes,) = stack.args
    return list(nodes)  # type: ignore[arg-type]


def _reduction(last: Node) -> Node | None:
    """The sum that a norm is, clamped or not, if nothing else reads it."""
    found = last.all_input_nodes[0] if last.target is aten.clamp.default and last.args[1:] == (0,) else last
    alone = all(len(node.users) <= 1 for node in (last, found))
    return found if found.target is aten.sum.dim_IntList and alone else None


def _norm(last: Node) -> _Norm | None:
    """The norm that ends in this node, if it is a sum of squares that nothing else reads."""
    if (reduction := _reduction(last)) is None:
        return None
    squares = reduction.all_input_nodes[0]
    every = tuple(range(1, squares.meta["val"].ndim))
    if squares.target is not aten.pow.Tensor_Scalar or squares.args[1] != 2 or _dims(reduction) != every:
        return None
    sizes = facts.shape(squares.meta["val"])[1:]
    if any(size.free_symbols for size in sizes) or not product(sizes):  # without elements there is no width
        return None
    return _Norm(last, reduction, squares, squares.all_input_nodes[0])


def _tiles(last: Node) -> Node | None:
    """The sums of squares over tiles, [B, n], that a kernel of psg_fx has written, if the norm is their sum."""
    if (reduction := _reduction(last)) is None:
        return None
    squares = reduction.all_input_nodes[0]
    kernel = squares.all_input_nodes[0] if squares.target is operator.getitem else squares
    tiled = is_tiled(kernel) or patch_products.is_tiled(kernel)
    return squares if tiled and squares.meta["val"].ndim == 2 and _dims(reduction) == (1,) else None


def _norms_together(gm: GraphModule, total: Node, is_cheap: Callable[..., bool], on_cuda: bool) -> None:
    """Replace Σ stack(norms)."""
    last = _stacked(total)  # a norm is there twice where two parameters have equal gradients
    norms = [norm for norm in map(_norm, last) if norm is not None]
    if len({norm.value.meta["val"].dtype for norm in norms}) > 1:
        return
    small = [norm for norm in norms if is_cheap(norm.value.meta["val"]) and _is_written_by_a_kernel(norm.value)]
    large = [norm for norm in norms if norm not in small and on_cuda and norm.value.meta["val"].ndim > 2]
    small, large = (found if len(found) > 1 else [] for found in (small, large))
    tiled = {node: _tiles(node) if on_cuda else None for node in last}
    tiles = [squares for node in last if (squares := tiled[node]) is not None]
    others = [node for node in last if not tiled[node] and node not in [norm.last for norm in (*small, *large)]]
    parts = []
    with gm.graph.inserting_before(gm.graph.output_node()):
        if small:
            sums = [sums_of(norm.value) if on_cuda else [] for norm in small]
            values = [found[0].value if found else norm.value for norm, found in zip(small, sums, strict=True)]
            beside = _beside(gm, values)
            parts.append(written(gm, aten.sum.dim_IntList, written(gm, aten.pow.Tensor_Scalar, beside, 2), [1]))
            sums_together(gm, beside, values, sums)
        if large:
            rows = _beside(gm, [_rows(gm, norm) for norm in large])
            parts.append(written(gm, aten.sum.dim_IntList, rows, [1]))
        for start in range(0, len(tiles), _READ_AT_ONCE):
            some = _beside(gm, tiles[start : start + _READ_AT_ONCE])
            parts.append(written(gm, aten.sum.dim_IntList, some, [1]))
        if others and parts:
            parts.append(written(gm, aten.sum.dim_IntList, written(gm, aten.stack.default, others), [0]))
        for part in parts[1:]:
            parts[0] = written(gm, aten.add.Tensor, parts[0], part)
    if parts:
        total.replace_all_uses_with(parts[0])


def _is_written_by_a_kernel(value: Node) -> bool:
    """Whether the kernel that makes it can write it to another place: one that sums; what has no rows in any case."""
    return value.meta["val"].ndim == 2 or origin(value)[0].target is aten.sum.dim_IntList


def _beside(gm: GraphModule, values: Sequence[Node]) -> Node:
    """[B, n] of each, side by side."""
    flat = [v if v.meta["val"].ndim == 2 else written(gm, aten.reshape.default, v, [-1, width(v)]) for v in values]
    return written(gm, aten.cat.default, flat, 1)


def _rows(gm: GraphModule, norm: _Norm) -> Node:
    """The sums of its squares over the last dims, under the name of the norm."""
    shape, name = facts.shape(norm.squares.meta["val"]), norm.reduction.name
    kept = next((k for k in range(len(shape) - 1, 2, -1) if product(shape[k:]) >= _ROW), 2)
    rows = written(gm, aten.sum.dim_IntList, norm.squares, list(range(kept, len(shape))))
    rows.meta = norm.reduction.meta | rows.meta
    norm.reduction._rename(f"{name}_whole")
    rows._rename(name)
    return rows


def _dims(reduction: Node) -> tuple[Any, ...]:
    return tuple(*reduction.args[1:])  # type: ignore[arg-type]
