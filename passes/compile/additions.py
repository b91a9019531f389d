"""Rows that are added to others by number, on a CPU: as `scatter_add`, which inductor leaves to torch's own kernel
where several threads run; or to zeros, in one op (`psg_fx/ops/added_rows.py`).

It would write all other such ops as atomic additions, one for each element.  12,480 rows of 64 into 3,120, two threads
of an AMD EPYC: 1.3 ms by `index_add` or `index_put`, 0.35 ms by `scatter_add`, and 0.3 ms by any of them with one
thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import call, is_zeros, value_of
from psg_fx.ops.added_rows import added_rows

aten = torch.ops.aten


def add_rows_by_scatter(gm: GraphModule) -> None:
    """Replace `index_add` along the first dim, and `index_put` that adds whole rows."""
    for node in list(gm.graph.nodes):
        if (found := _addition(node)) is not None:
            with gm.graph.inserting_before(node):
                into, ids, rows = found
                if node.target is not aten.index_add.default:
                    ids = _from_the_start(gm, into, ids)
                ids, rows = _one_by_one(gm, into, ids, rows)
                new = _is_new(into)
                if new:
                    made = call(gm, added_rows, ids, rows, value_of(into).shape[0])
                else:
                    made = call(gm, aten.scatter_add.default, into, 0, _by_element(gm, into, ids), rows)
            made.meta = node.meta | {"val": made.meta["val"]}
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
            if new:
                gm.graph.erase_node(into)


def _is_new(into: Node) -> bool:
    """Whether it is zeros that nothing else reads, of a known number."""
    return is_zeros(into) and len(into.users) == 1 and isinstance(value_of(into).shape[0], int)


def _addition(node: Node) -> tuple[Node, Node, Node] | None:
    """What is added to, the numbers of its rows, and the rows, if the node adds these and nothing else."""
    arguments: Any = node.args
    if node.target is aten.index_add.default and not node.kwargs:
        into, dim, ids, rows = arguments
        along = dim == 0
    elif node.target in (aten.index_put.default, aten._unsafe_index_put.default) and arguments[3:] == (True,):
        into, (ids, *others), rows = arguments[:3]
        along = not others and isinstance(ids, Node)
    else:
        return None
    if not along or value_of(ids).dtype is torch.bool or not value_of(ids).ndim:
        return None
    whole = facts.shape(value_of(rows)) == (*facts.shape(value_of(ids)), *facts.shape(value_of(into))[1:])
    return (into, ids, rows) if whole else None


def _one_by_one(gm: GraphModule, into: Node, ids: Node, rows: Node) -> tuple[Node, Node]:
    """The numbers as int64, and the rows, one behind the other."""
    if value_of(ids).ndim > 1:
        rows = call(gm, aten.reshape.default, rows, [-1, *_row(gm, into)])
        ids = call(gm, aten.reshape.default, ids, [-1])
    if value_of(ids).dtype is not torch.int64:
        ids = call(gm, aten._to_copy.default, ids, dtype=torch.int64)
    return ids, rows


def _by_element(gm: GraphModule, into: Node, ids: Node) -> Node:
    """The number of the row that each element is added to."""
    row = _row(gm, into)
    ids = call(gm, aten.reshape.default, ids, [-1, *[1] * len(row)])
    return call(gm, aten.expand.default, ids, [-1, *row])


def _row(gm: GraphModule, into: Node) -> list[Any]:
    """The sizes of a row."""
    return [_size(gm, into, dim) for dim in range(1, value_of(into).ndim)]


def _from_the_start(gm: GraphModule, into: Node, ids: Node) -> Node:
    """Numbers of rows of which none is negative."""
    from_the_end = call(gm, aten.add.Tensor, ids, _size(gm, into, 0))
    return call(gm, aten.where.self, call(gm, aten.lt.Scalar, ids, 0), from_the_end, ids)


def _size(gm: GraphModule, node: Node, dim: int) -> Any:
    """The size of a dim, as an argument of a node."""
    size: Any = value_of(node).shape[dim]
    return size if isinstance(size, int) else call(gm, aten.sym_size.int, node, dim)
