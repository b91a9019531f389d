"""Whole rows picked number by number: a mask that is the same along the last dims, and what it picks put in rows again.

    x[m.unsqueeze(-1).expand_as(x)].view(-1, C)  ->  x[m]        x.masked_select(m.unsqueeze(-1)).view(-1, C)  ->  x[m]

How many numbers are picked depends on the data, so that which of them are of one row is seen only here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, size_of, value_of, written_before
from psg_fx.torch_private.modes import enable_python_dispatcher
from psg_fx.torch_private.symbols import rows_for_ops

from ..arguments import bound, op_name
from ..run import run_node
from .picked import asserts, symbols_of

aten = torch.ops.aten
_ROWS = ("aten.view", "aten.reshape", "aten._unsafe_view")
_NUMBERS = (torch.SymInt, torch.SymBool)
_WIDER = ("aten.expand", "aten.repeat")
_SAME = ("aten.alias", "aten.clone", "aten.detach", "aten._to_copy")


@dataclass(frozen=True)
class _Whole:
    """Numbers that a mask picks, put in rows: those of the last dims, along which the mask is the same.

    node: the rows.  dims: how many of the last dims make one.
    """

    node: Node
    pick: Node
    mask: Node
    dims: int


def pick_whole_rows(gm: GraphModule) -> None:
    """Rewrite these; numbers that are put in other shapes stay as they are."""
    masks = {node: mask for node in gm.graph.nodes if (mask := _mask_by(node)) is not None}
    found = [whole for pick, mask in masks.items() for node in pick.users if (whole := _whole(node, pick, mask))]
    if not found:
        return
    counts = {mask: value_of(pick).shape[0] for pick, mask in masks.items() if value_of(pick).ndim == 1}
    said, changed = set().union(*(symbols_of(whole.node) for whole in found)), set()
    for pick in {whole.pick for whole in found}:
        _without_checks(gm, pick)
    for whole in found:
        made = _picked(gm, whole, counts)
        _count_by(gm, made, whole)
        whole.node.replace_all_uses_with(made)
        changed.add(made)
    gm.graph.eliminate_dead_code()
    _count_alike(gm, changed, said)
    gm.recompile()


def _mask_by(node: Node) -> Node | None:
    """The mask by which a node picks numbers of a tensor of as many dims."""
    mask: Any = None
    if node.target is aten.masked_select.default:
        mask = node.args[1]
    elif node.target is aten.index.Tensor:
        mask = node.args[1][0] if len(node.args[1]) == 1 else None  # type: ignore[index, arg-type]
    if mask is None or mask.meta["val"].dtype is not torch.bool:
        return None
    return mask if mask.meta["val"].ndim == node.args[0].meta["val"].ndim else None  # type: ignore[union-attr]


def _whole(node: Node, pick: Node, mask: Node) -> _Whole | None:
    """What a node makes of the numbers that are picked, if it puts whole rows in rows again."""
    if op_name(node) not in _ROWS or node.args[0] is not pick:
        return None
    shape, own = facts.shape(value_of(pick.args[0])), facts.shape(value_of(mask))
    rows = facts.shape(value_of(node))
    for dims in range(1, len(shape)):
        known = all(size.is_number for size in (*shape[-dims:], *rows[1:]))
        fits = shape[:-dims] == own[:-dims] and own[-dims] in (1, shape[-dims])
        if not known or not fits or not _is_same_along(mask, dims):
            return None
        if len(rows) > 1 and math.prod(shape[-dims:]) == math.prod(rows[1:]):
            return _Whole(node, pick, mask, dims)
    return None


def _is_same_along(mask: Node, count: int) -> bool:
    """Whether a mask is the same along its last dims."""
    value = value_of(mask)
    if all(size == 1 for size in value.shape[-count:]):
        return True
    if mask.op != "call_function" or not mask.all_input_nodes:
        return False
    if op_name(mask) in _WIDER:
        source = value_of(mask.args[0])
        return source.ndim == value.ndim and all(size == 1 for size in source.shape[-count:])
    given = [node for node in mask.all_input_nodes if isinstance(node.meta["val"], torch.Tensor)]
    return _is_by_entry(mask) and bool(given) and all(_is_same_along(node, count) for node in given)


def _is_by_entry(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node) in _SAME


def _of_rows(gm: GraphModule, mask: Node, count: int) -> Node:
    """A mask without its last dims, as it was before it had them, if it is made so."""
    if not count:
        return mask
    name, ndim = op_name(mask), value_of(mask).ndim
    before = facts.shape(value_of(mask.args[0])) if name in _WIDER else ()
    if len(before) == ndim and before[:-count] == facts.shape(value_of(mask))[:-count]:
        return _of_rows(gm, mask.args[0], count)  # type: ignore[arg-type]
    if name == "aten.unsqueeze" and bound(mask)["dim"] in (-1, ndim - 1):
        return _of_rows(gm, bound(mask)["self"], count - 1)
    return _of_rows(gm, call(gm, aten.select.int, mask, -1, 0), count - 1)


def _picked(gm: GraphModule, whole: _Whole, counts: dict[Node, Any]) -> Node:
    """The rows by their mask, as many as others that it picks."""
    x, like = whole.pick.args[0], value_of(whole.node)
    last = [int(size) for size in value_of(x).shape[-whole.dims :]]
    with written_before(whole.node, whole.node.meta):
        mask = _of_rows(gm, whole.mask, whole.dims)
        made = call(gm, aten.index.Tensor, x, [mask])
        number = counts.setdefault(mask, value_of(made).shape[0])
        with like.fake_mode:  # type: ignore[attr-defined]
            made.meta["val"] = like.new_empty(number, *last)
        return made if last == list(like.shape[1:]) else call(gm, aten.reshape.default, made, [-1, *like.shape[1:]])


def _count_by(gm: GraphModule, made: Node, whole: _Whole) -> None:
    """The number of rows as it is from here on, where it was computed from that of what is picked."""
    count = facts.shape(value_of(whole.node))[0]
    numbers = [n for n in _numbers(whole.pick) if isinstance(n.meta.get("val"), torch.SymInt)]
    for number in [n for n in numbers if facts.expr(n.meta["val"]) == count]:
        with gm.graph.inserting_after(made):
            size = size_of(gm.graph, made, 0)
        number.replace_all_uses_with(size, lambda user: user > whole.node)


def _count_alike(gm: GraphModule, rows: set[Node], symbols: set[sympy.Symbol]) -> None:
    """Let what is made of these rows have sizes that follow from theirs, where it had sizes of these symbols."""
    after = facts.descendants(rows) - rows
    fakes = value_of(next(iter(rows))).fake_mode  # type: ignore[attr-defined]
    for node in [n for n in gm.graph.nodes if n in after and symbols & symbols_of(n)]:
        with fakes, enable_python_dispatcher(), torch.no_grad(), rows_for_ops():
            try:
                node.meta["val"] = run_node(node)
            except Exception:  # rows of other masks, which are not known to be as many: they are not rewritten
                return


def _without_checks(gm: GraphModule, pick: Node) -> None:
    """Checks of how many numbers are picked, such as that they make whole rows."""
    for node in filter(asserts, _numbers(pick)):
        gm.graph.erase_node(node)


def _numbers(pick: Node) -> list[Node]:
    """Those that are computed from the number of what is picked, and checks of them."""
    found, waiting = [], [pick]
    while waiting:
        users = [u for u in waiting.pop().users if u not in found and not isinstance(u.meta.get("val"), torch.Tensor)]
        users = [u for u in users if asserts(u) or isinstance(u.meta.get("val"), _NUMBERS)]
        found += users
        waiting += users
    return found
