"""Weighted sums of gradients, Σ_b c[b] g[b], as `totals` writes them: of what lies side by side as one, of what is
stored anyway as a product, or on a CUDA device by a kernel of psg_fx.
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
from psg_fx.graph.nodes import call, output, put_in_place
from psg_fx.graph.order import is_reshaped, is_same
from psg_fx.ops.experts import expert_outer
from psg_fx.ops.products import weighted_sums
from psg_fx.tensors import product

aten = torch.ops.aten

_KEPT = (aten.bmm.default, expert_outer, operator.getitem, aten.index_add.default)
"""What makes gradients that are stored whole: products, alone or with the squares of their tiles, and rows that are
added up.
"""


@dataclass(frozen=True)
class _Sum:
    """Σ_b c[b] value[b]: the value, c as it is multiplied, and the last of the casts of the sum.

    absent: where samples are left out, whatever their values are; None if none are.
    """

    value: Node
    weights: Node
    casts: tuple[Node, ...]
    last: Node
    absent: Node | None

    @property
    def key(self) -> Any:
        """Equal for sums that can be one."""
        casts = tuple(tuple(sorted(cast.kwargs.items(), key=str)) for cast in self.casts)
        return origin(self.weights), self.absent and origin(self.absent), casts


def sums_of(value: Node) -> list[_Sum]:
    """The weighted sums of a gradient, under whatever view; those of the first such view."""
    found: list[_Sum] = []
    known = origin(value)
    for view in _views_of(known[0]):
        if origin(view) == known and (not found or view is found[0].value):
            of_view = [_sum(view, *way, made) for way in _with_and_without(view) for made in way[0].users]
            found += [one for one in of_view if one is not None]
    return found


def _sum(view: Node, shown: Node, absent: Node | None, made: Node) -> _Sum | None:
    """The sum of what is made of a view by multiplying what shows it, if that is by weights."""
    other = [node for node in made.all_input_nodes if node is not shown]
    if made.target is not aten.mul.Tensor or len(other) != 1 or not is_weights(other[0], shown) or len(made.users) != 1:
        return None
    (summed,) = made.users
    if not adds_samples(summed):
        return None
    casts = tuple(_casts_after(summed))
    return _Sum(view, other[0], casts, (summed, *casts)[-1], absent)


def _with_and_without(view: Node) -> Iterator[tuple[Node, Node | None]]:
    """A gradient as it is; and with zeros where samples are left out, and where these are."""
    yield view, None
    for user in view.users:
        if (absent := _absent(user)) is not None:
            yield user, absent


def _absent(node: Node) -> Node | None:
    """Where samples are left out, if zeros are put in their places."""
    if node.target is not aten.masked_fill.Scalar or node.args[2] != 0:
        return None
    value, absent = node.all_input_nodes
    return absent if is_weights(absent, value) else None


def adds_samples(node: Node) -> bool:
    """Whether it is a sum over the first dim."""
    return node.target is aten.sum.dim_IntList and node.args[1:] == ([0],)


def is_weights(node: Node, value: Node) -> bool:
    """Whether it is a number for each sample of a value, and nothing that lies along another of its dims."""
    shape, of_value = facts.shape(node.meta["val"]), facts.shape(value.meta["val"])
    along = len(shape) == len(of_value) and shape[:1] == of_value[:1] and all(size == 1 for size in shape[1:])
    return along and origin(node)[0].meta["val"].ndim == 1


def sums_together(gm: GraphModule, beside: Node, values: Sequence[Node], sums: Sequence[Sequence[_Sum]]) -> None:
    """Replace sums of what lies side by side, those with equal weights by slices of one."""
    ends = [0]
    for value in values:
        ends.append(ends[-1] + width(value))
    alike: dict[Any, dict[Node, tuple[int, _Sum]]] = {}
    for k, of_one in enumerate(sums):
        for one in of_one:
            alike.setdefault(one.key, {})[one.last] = (k, one)
    for members in (list(found.values()) for found in alike.values() if len(found) > 1):
        first = members[0][1]
        weights = written(gm, aten.reshape.default, first.weights, [-1, 1])
        read = beside
        if first.absent is not None:
            absent = written(gm, aten.reshape.default, first.absent, [-1, 1])
            read = written(gm, aten.masked_fill.Scalar, beside, absent, 0)
        whole = written(gm, aten.sum.dim_IntList, written(gm, aten.mul.Tensor, read, weights), [0])
        for cast in first.casts:
            whole = written(gm, cast.target, whole, **cast.kwargs)
        for k, one in members:
            part = written(gm, aten.slice.Tensor, whole, 0, ends[k], ends[k + 1])
            put_in_place(one.last, written(gm, aten.reshape.default, part, list(one.last.meta["val"].shape)))


def as_product(gm: GraphModule, total: Node, is_cheap: Callable[..., bool]) -> None:
    """Write Σ_b c[b] value[b], of a value that is stored as it is, as a product of matrices."""
    if (factors := _factors(total)) is None:
        return
    weights, value = factors
    like = value.meta["val"]
    if _stored(value).target not in (aten.bmm.default, expert_outer) or is_cheap(like):
        return
    if any(node.meta["val"].dtype not in (torch.float32, torch.float64) for node in (weights, value, total)):
        return
    with gm.graph.inserting_before(gm.graph.output_node()):
        row = written(gm, aten.reshape.default, weights, [1, -1])
        found = written(gm, aten.mm.default, row, written(gm, aten.reshape.default, value, [-1, width(value)]))
        put_in_place(total, written(gm, aten.reshape.default, found, list(like.shape[1:])))


def _factors(total: Node) -> tuple[Node, Node] | None:
    """c and value, if this is Σ_b c[b] value[b] and nothing else reads the products."""
    weighted = total.all_input_nodes[0]
    factors = weighted.all_input_nodes
    if weighted.target is not aten.mul.Tensor or len(weighted.users) > 1 or len(factors) != 2:
        return None
    one, other = factors
    if is_weights(one, other):
        return one, other
    return (other, one) if is_weights(other, one) else None


def by_kernel(gm: GraphModule, totals: Sequence[Node], is_cheap: Callable[..., bool]) -> None:
    """Write Σ_b c[b] value[b], of values that are stored, by psg_fx's kernel, those of one size and dtype at once."""
    alike: dict[Any, list[tuple[Node, Node, Node]]] = {}
    for total in totals:
        if not total.users or (factors := _factors(total)) is None:
            continue
        weights, value = factors
        stored, is_cut = _kept_in(value, weights)
        dtypes = [node.meta["val"].dtype for node in (stored, weights, value, total)]
        if stored.target in _KEPT and dtypes[0] in weighted_sums.DTYPES and {*dtypes[1:]} == {torch.float32}:
            key = origin(weights), is_cut, dtypes[0], width(value)
            alike.setdefault(key, []).append((total, weights, stored))
    for (_, leave_out, _, count), members in alike.items():
        if not is_cheap(*(stored.meta["val"] for _, _, stored in members)):
            _written_together(gm, members, count, leave_out)


def _kept_in(value: Node, weights: Node) -> tuple[Node, bool]:
    """What is stored, of which this shows each element in its place; and whether samples of weight 0 are left out."""
    leave_out = False
    while is_same(value) or is_reshaped(value) or _is_cut(value, weights):
        leave_out |= _is_cut(value, weights)
        value = value.all_input_nodes[0]
    return value, leave_out


def _is_cut(node: Node, weights: Node) -> bool:
    """Whether it puts zeros in the places of samples of weight 0, and no others."""
    if (absent := _absent(node)) is None:
        return False
    asked, _ = origin(absent)
    if asked.target is not aten.eq.Scalar or asked.args[1] != 0:
        return False
    return origin(asked.all_input_nodes[0])[0] is origin(weights)[0]


def _written_together(gm: GraphModule, members: Sequence[tuple[Node, Node, Node]], count: int, leave_out: bool) -> None:
    """Replace sums of one size and with equal weights: a total, its weights and what is stored of each.  One that is
    rounded to half precision only to be made float32 again is not rounded: that would be a kernel of its own.
    """
    with gm.graph.inserting_before(gm.graph.output_node()):
        weights = written(gm, aten.reshape.default, members[0][1], [-1])
        rows = [written(gm, aten.reshape.default, stored, [-1, count]) for _, _, stored in members]
        sums = written(gm, weighted_sums.overload(), weights, rows, leave_out)
        for k, (total, _, _) in enumerate(members):
            one, casts = output(gm, sums, k), list(_casts_after(total))
            last = casts[-1] if casts and casts[-1].meta["val"].dtype is torch.float32 else total
            put_in_place(last, written(gm, aten.reshape.default, one, list(last.meta["val"].shape)))


def _stored(value: Node) -> Node:
    """The value that it is in other sizes, element for element."""
    while is_reshaped(value):
        value = value.all_input_nodes[0]
    return value


# --- nodes ---------------------------------------------------------------------------------------------------------


def written(gm: GraphModule, op: Any, *arguments: Any, **named: Any) -> Node:
    """A node of this pass."""
    made = call(gm, op, *arguments, **named)
    made.meta["psg_fx_pass"] = "totals"
    return made


def width(node: Node) -> int:
    """Elements of one sample."""
    return int(product(facts.shape(node.meta["val"])[1:]))


def _passes_on(node: Node) -> bool:
    """Whether it shows the value of its operand, one tensor, in another layout or dtype."""
    if not (is_view(node) or node.target is aten._to_copy.default):
        return False
    return all(isinstance(n.meta.get("val"), torch.Tensor) for n in (node, *node.all_input_nodes[:1]))


def origin(node: Node) -> tuple[Node, tuple[torch.dtype, ...]]:
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
