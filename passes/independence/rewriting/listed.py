"""Rows picked, or written, by the places that a mask lists are rows that it picks: `x[torch.where(m)]` is `x[m]`.

i, j = torch.where(m);  x[i, j] is x[m]        i = m.nonzero().squeeze(1);  x[i] and x.index_select(0, i) are x[m]
i = torch.arange(N)[m];  x[i] is x[m]          x[i, j] = v  is  x[m] = v
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, value_of, written_before

from ..arguments import bound, op_name
from .numbers import counts_rows
from .picked import LISTS, ONE_ROW, asserts

aten = torch.ops.aten
_SAME = ("aten.squeeze", "aten.view", "aten.reshape", "aten.flatten", "aten.alias", "aten._to_copy")
"""What gives the places in one dim again."""
_FILLS = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
"""Which writes one number along a dim."""


def pick_by_masks(gm: GraphModule) -> None:
    """Rewrite picks and writes by all the places of a mask.  Those by some of its dims stay as they are."""
    lists = [node for node in gm.graph.nodes if mask_of(node) is not None]
    for node in lists:
        columns, mask = columns_of(node), mask_of(node)
        for user in [u for column in columns for u in column.users if _is_by_all(u, columns, mask)]:
            _by_mask(gm, user, mask)
        for column in columns:
            _counted(gm, column, mask)
        _without_checks(gm, node)
    if lists:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def mask_of(node: Node) -> Any:
    """The mask whose places a node lists; None for other nodes."""
    if node.target in LISTS:
        return node.args[0]
    if node.target is aten.index.Tensor and counts_rows(node.args[0]):  # type: ignore[arg-type]
        given: Any = node.args[1]
        alone = len(given) == 1 and value_of(given[0]).dtype is torch.bool
        return given[0] if alone and value_of(node.args[0]).ndim == value_of(given[0]).ndim == 1 else None
    return None


def columns_of(listed: Node) -> dict[Node, int]:
    """The places along each dim of the mask that nodes hold."""
    ndim = value_of(mask_of(listed)).ndim
    found: dict[Node, int] = {} if listed.target in LISTS else {listed: 0}
    waiting = [listed]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            name, place = op_name(user), found.get(node)
            if place is None and user.target is operator.getitem:
                place = int(user.args[1])  # type: ignore[arg-type]
            elif place is None and name == "aten.select" and bound(user)["dim"] in (1, -1):
                place = int(bound(user)["index"]) % ndim
            elif place is None and name == "aten.unbind" and bound(user)["dim"] in (1, -1):
                waiting.append(user)
            elif name in _SAME and _is_flat(user, node) and (place is not None or ndim == 1):
                place = place or 0
            else:
                place = None
            if place is not None and user not in found and not user.meta.get(ONE_ROW):  # a number, if there is one
                found[user] = place
                waiting.append(user)
    return found


def _is_flat(node: Node, listed: Node) -> bool:
    value = node.meta["val"]
    return value.ndim == 1 and bool(facts.shape(value)[0] == facts.shape(listed.meta["val"])[0])


def _is_by_all(node: Node, columns: dict[Node, int], mask: Any) -> bool:
    """Whether a node picks or writes by all dims of the mask, from dims of its sizes."""
    x: Any = node.args[0]
    given: Any
    if node.target in (aten.index.Tensor, aten.index_put.default):
        given = node.args[1]
    elif node.target in (aten.index_select.default, *_FILLS) and node.args[1] == 0:
        given = [node.args[2]]
    else:
        return False
    shape, own = (facts.shape(n.meta["val"]) for n in (x, mask))
    return [columns.get(n) for n in given] == list(range(len(own))) and bool(shape[: len(own)] == own)


def _by_mask(gm: GraphModule, node: Node, mask: Node) -> None:
    target: Any = aten.index.Tensor
    written: tuple[Any, ...] = ()
    if node.target is aten.index_put.default:
        target, written = node.target, node.args[2:]
    if node.target in _FILLS:
        target, written = aten.index_put.default, (_as_tensor(gm, node),)
    with written_before(node, node.meta):
        made = gm.graph.call_function(target, (node.args[0], [_bool(gm, mask)], *written), node.kwargs)
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made)


def _as_tensor(gm: GraphModule, fill: Node) -> Any:
    """What is written, as a tensor without dims."""
    value: Any = fill.args[3]
    if isinstance(value, Node):
        return value
    with written_before(fill, fill.meta):
        return call(gm, aten.new_full.default, fill.args[0], [], value)


def _counted(gm: GraphModule, column: Node, mask: Node) -> None:
    """The length of a column, as that of what the mask picks."""
    for number in [user for user in column.users if user.target is aten.sym_size.int]:
        with written_before(number, number.meta):
            mask = _bool(gm, mask)
            made = gm.graph.call_function(aten.index.Tensor, (call(gm, aten.ones_like.default, mask), [mask]))
            with value_of(mask).fake_mode:  # type: ignore[attr-defined]
                made.meta["val"] = value_of(column).to(torch.bool)
        number.args = (made, 0)


def _bool(gm: GraphModule, mask: Node) -> Node:
    """Where what is listed is not zero, where the graph inserts."""
    return mask if value_of(mask).dtype is torch.bool else call(gm, aten.ne.Scalar, mask, 0)


def _without_checks(gm: GraphModule, listed: Node) -> None:
    """Checks of how many places there are, where nothing but numbers and places is made of these."""
    after = facts.descendants([listed])
    if all(not node.users or _is_number_or_place(node) for node in after):
        for node in reversed([n for n in gm.graph.nodes if n in after and asserts(n)]):
            gm.graph.erase_node(node)


def _is_number_or_place(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or (value.dtype is torch.int64 and value.ndim <= 2)
