"""totals: norms of the whole model, and sums of small gradients, are added up together, not parameter by parameter.

    Σ_p Σ_k g_p[b, k]²  =  Σ_k [ .. g_p .. ][b, k]²  +  Σ_k [ .. Σ_l g_q[b, k, l]² .. ][b, k]

A reduction of `[B, n]` to `[B]` is a kernel of its own, two where n is large, and a model has one for each of its
parameters.  In their place small gradients (of biases, of scales of norms) lie side by side, where the kernels that
make them write them; and so do the sums of the rows of large ones.  On a CUDA device the weighted sums of small
gradients are one product with what lies there, too, and the results are slices of it.

Norms that are wanted by parameter, and those that are no sums of squares (of Gram matrices), are left as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.lifetimes import is_view
from psg_fx.graph.nodes import call, in_order, put_in_place
from psg_fx.graph.same_op import merge_equal
from psg_fx.graph.stages import Stage
from psg_fx.ops import patch_products
from psg_fx.ops.experts import expert_outer
from psg_fx.ops.tile_products import is_tiled
from psg_fx.planner.cost import Device
from psg_fx.planner.plan import PLAN
from psg_fx.tensors import product

from .runner import graph_pass

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

    def is_cheap(value: torch.Tensor) -> bool:
        """Whether writing and reading it takes less than the launch of a kernel."""
        count = product(facts.shape(value))
        count = int(count.subs({symbol: size if symbol == batch else groups for symbol in count.free_symbols}))
        return 2 * count * value.dtype.itemsize <= device.launch * device.bandwidth

    sums = [n for n in gm.graph.nodes if n.target is aten.sum.dim_IntList and n.args[1:] == ([0],)]
    for total in sums:
        if _stacked(total):
            _norms_together(gm, total, is_cheap, on_cuda=device.name == "cuda")
    for total in sums if device.name == "cpu" else ():
        _as_product(gm, total, is_cheap)
    in_order(gm)
    merge_equal(gm)
    gm.graph.eliminate_dead_code()
    return gm


# --- norms ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Norm:
    """A squared norm that is a sum of squares, [B]: its last node, the reduction, the squares, and what is squared."""

    last: Node
    reduction: Node
    squares: Node
    value: Node


def _stacked(total: Node) -> list[Node]:
    """The nodes whose sum it is, as often as they are in it."""
    stack = _operands(total)[0]
    if stack.target is not aten.stack.default or len(stack.args) > 1:
        return []
    (nodes,) = stack.args
    return list(nodes)  # type: ignore[arg-type]


def _norm(last: Node) -> _Norm | None:
    """The norm that ends in this node, if it is a sum of squares that nothing else reads."""
    reduction = _operands(last)[0] if last.target is aten.clamp.default and last.args[1:] == (0,) else last
    if reduction.target is not aten.sum.dim_IntList or any(len(node.users) > 1 for node in (last, reduction)):
        return None
    squares = _operands(reduction)[0]
    every = tuple(range(1, squares.meta["val"].ndim))
    if squares.target is not aten.pow.Tensor_Scalar or squares.args[1] != 2 or _dims(reduction) != every:
        return None
    if any(size.free_symbols for size in facts.shape(squares.meta["val"])[1:]):
        return None
    return _Norm(last, reduction, squares, _operands(squares)[0])


def _tiles(last: Node) -> Node | None:
    """The sums of squares over tiles, [B, n], that a kernel of psg_fx has written, if the norm is their sum."""
    reduction = _operands(last)[0] if last.target is aten.clamp.default and last.args[1:] == (0,) else last
    if reduction.target is not aten.sum.dim_IntList or any(len(node.users) > 1 for node in (last, reduction)):
        return None
    squares = _operands(reduction)[0]
    kernel = _operands(squares)[0] if squares.target is operator.getitem else squares
    tiled = is_tiled(kernel) or patch_products.is_tiled(kernel)
    return squares if tiled and squares.meta["val"].ndim == 2 and _dims(reduction) == (1,) else None


def _norms_together(gm: GraphModule, total: Node, is_cheap: Callable[[torch.Tensor], bool], on_cuda: bool) -> None:
    """Replace Σ stack(norms)."""
    last = _stacked(total)  # a norm is there twice where two parameters have equal gradients
    norms = [norm for norm in map(_norm, last) if norm is not None]
    if len({norm.value.meta["val"].dtype for norm in norms}) > 1:
        return
    small = [norm for norm in norms if is_cheap(norm.value.meta["val"]) and _is_written_by_a_kernel(norm.value)]
    large = [norm for norm in norms if norm not in small and on_cuda and norm.value.meta["val"].ndim > 2]
    small, large = (found if len(found) > 1 else [] for found in (small, large))
    tiles = {node: squares for node in last if on_cuda and (squares := _tiles(node)) is not None}
    others = [node for node in last if node not in tiles and node not in [norm.last for norm in (*small, *large)]]
    parts = []
    with gm.graph.inserting_before(gm.graph.output_node()):
        if small:
            sums = [_sums_of(norm.value) if on_cuda else [] for norm in small]
            values = [found[0].value if found else norm.value for norm, found in zip(small, sums, strict=True)]
            beside = _beside(gm, values)
            parts.append(_call(gm, aten.sum.dim_IntList, _call(gm, aten.pow.Tensor_Scalar, beside, 2), [1]))
            _sums_together(gm, beside, values, sums)
        if large:
            rows = _beside(gm, [_rows(gm, norm) for norm in large])
            parts.append(_call(gm, aten.sum.dim_IntList, rows, [1]))
        for start in range(0, len(tiles), _READ_AT_ONCE):
            some = _beside(gm, list(tiles.values())[start : start + _READ_AT_ONCE])
            parts.append(_call(gm, aten.sum.dim_IntList, some, [1]))
        if others and parts:
            parts.append(_call(gm, aten.sum.dim_IntList, _call(gm, aten.stack.default, others), [0]))
        for part in parts[1:]:
            parts[0] = _call(gm, aten.add.Tensor, parts[0], part)
    if parts:
        total.replace_all_uses_with(parts[0])


def _is_written_by_a_kernel(value: Node) -> bool:
    """Whether the kernel that makes it can write it to another place: one that sums; what has no rows in any case."""
    return value.meta["val"].ndim == 2 or _origin(value)[0].target is aten.sum.dim_IntList


def _beside(gm: GraphModule, values: Sequence[Node]) -> Node:
    """[B, n] of each, side by side."""
    flat = [v if v.meta["val"].ndim == 2 else _call(gm, aten.reshape.default, v, [-1, _width(v)]) for v in values]
    return _call(gm, aten.cat.default, flat, 1)


def _rows(gm: GraphModule, norm: _Norm) -> Node:
    """The sums of its squares over the last dims, under the name of the norm."""
    shape, name = facts.shape(norm.squares.meta["val"]), norm.reduction.name
    kept = next((k for k in range(len(shape) - 1, 2, -1) if product(shape[k:]) >= _ROW), 2)
    rows = _call(gm, aten.sum.dim_IntList, norm.squares, list(range(kept, len(shape))))
    rows.meta = norm.reduction.meta | rows.meta
    norm.reduction._rename(f"{name}_whole")
    rows._rename(name)
    return rows


# --- weighted sums -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    """Σ_b c[b] value[b]: the value, c as it is multiplied, and the last of the casts of the sum."""

    value: Node
    weights: Node
    casts: tuple[Node, ...]
    last: Node

    @property
    def key(self) -> Any:
        """Equal for sums that can be one."""
        return (_origin(self.weights), tuple(tuple(sorted(cast.kwargs.items(), key=str)) for cast in self.casts))


def _sums_of(value: Node) -> list[_Sum]:
    """The weighted sums of a gradient, under whatever view; those of the first such view."""
    found: list[_Sum] = []
    origin = _origin(value)
    for view in _views_of(origin[0]):
        same = _origin(view) == origin and (not found or view is found[0].value)
        for made in list(view.users) if same else []:
            other = [node for node in _operands(made) if node is not view]
            if made.target is aten.mul.Tensor and len(other) == 1 and _is_weights(other[0]) and len(made.users) == 1:
                (summed,) = made.users
                if summed.target is aten.sum.dim_IntList and summed.args[1:] == ([0],):
                    casts = tuple(_casts_after(summed))
                    found.append(_Sum(view, other[0], casts, (summed, *casts)[-1]))
    return found


def _is_weights(node: Node) -> bool:
    """Whether it is a number for each sample."""
    return all(size == 1 for size in facts.shape(node.meta["val"])[1:]) and _origin(node)[0].meta["val"].ndim == 1


def _sums_together(gm: GraphModule, beside: Node, values: Sequence[Node], sums: Sequence[Sequence[_Sum]]) -> None:
    """Replace sums of what lies side by side, those with equal weights by slices of one."""
    ends = [0]
    for value in values:
        ends.append(ends[-1] + _width(value))
    alike: dict[Any, dict[Node, tuple[int, _Sum]]] = {}
    for k, of_one in enumerate(sums):
        for one in of_one:
            alike.setdefault(one.key, {})[one.last] = (k, one)
    for members in (list(found.values()) for found in alike.values() if len(found) > 1):
        first = members[0][1]
        weights = _call(gm, aten.reshape.default, first.weights, [-1, 1])
        whole = _call(gm, aten.sum.dim_IntList, _call(gm, aten.mul.Tensor, beside, weights), [0])
        for cast in first.casts:
            whole = _call(gm, cast.target, whole, **cast.kwargs)
        for k, one in members:
            part = _call(gm, aten.slice.Tensor, whole, 0, ends[k], ends[k + 1])
            put_in_place(one.last, _call(gm, aten.reshape.default, part, list(one.last.meta["val"].shape)))


def _as_product(gm: GraphModule, total: Node, is_cheap: Callable[[torch.Tensor], bool]) -> None:
    """Write Σ_b c[b] value[b], of a value that is stored as it is, as a product of matrices."""
    (weighted,) = _operands(total)
    if weighted.target is not aten.mul.Tensor or len(weighted.users) > 1 or len(_operands(weighted)) != 2:
        return
    weights, value = sorted(_operands(weighted), key=lambda node: not _is_weights(node))
    like = value.meta["val"]
    if _stored(value).target not in (aten.bmm.default, expert_outer) or not _is_weights(weights) or is_cheap(like):
        return
    if any(node.meta["val"].dtype not in (torch.float32, torch.float64) for node in (weights, value, total)):
        return
    with gm.graph.inserting_before(gm.graph.output_node()):
        row = _call(gm, aten.reshape.default, weights, [1, -1])
        found = _call(gm, aten.mm.default, row, _call(gm, aten.reshape.default, value, [-1, _width(value)]))
        put_in_place(total, _call(gm, aten.reshape.default, found, list(like.shape[1:])))


def _stored(value: Node) -> Node:
    """The value that it is in other sizes, element for element."""
    while value.target in (aten.view.default, aten.reshape.default):
        (value,) = value.all_input_nodes[:1]
    return value


# --- nodes ---------------------------------------------------------------------------------------------------------


def _call(gm: GraphModule, op: Any, *arguments: Any, **named: Any) -> Node:
    """A node of this pass."""
    made = call(gm, op, *arguments, **named)
    made.meta["psg_fx_pass"] = "totals"
    return made


def _operands(node: Node) -> list[Node]:
    return list(node.all_input_nodes)


def _dims(reduction: Node) -> tuple[Any, ...]:
    return tuple(*reduction.args[1:])  # type: ignore[arg-type]


def _width(node: Node) -> int:
    """Elements of one sample."""
    return int(product(facts.shape(node.meta["val"])[1:]))


def _passes_on(node: Node) -> bool:
    """Whether it shows the value of its operand in another layout or dtype."""
    return isinstance(node.meta.get("val"), torch.Tensor) and (is_view(node) or node.target is aten._to_copy.default)


def _origin(node: Node) -> tuple[Node, tuple[torch.dtype, ...]]:
    """The value that it shows, and the dtypes that it has had on the way."""
    dtypes = [node.meta["val"].dtype]
    while _passes_on(node):
        node = node.all_input_nodes[0]
        dtypes += [] if node.meta["val"].dtype is dtypes[-1] else [node.meta["val"].dtype]
    return node, tuple(dtypes)


def _views_of(node: Node) -> Iterator[Node]:
    """It, and all that shows it."""
    yield node
    for user in node.users:
        if _passes_on(user) and user.args[0] is node:
            yield from _views_of(user)


def _casts_after(node: Node) -> Iterator[Node]:
    """The casts that follow, as long as nothing else reads what is cast."""
    while len(node.users) == 1 and (user := next(iter(node.users))).target is aten._to_copy.default:
        yield user
        node = user
