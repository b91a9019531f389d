"""Where each expert's rows end, once rows are sorted by expert: the cumulated counts of their ids, however counted.

A count is a sum over rows of what each row's id adds, so it is known from what each single id adds; and an expert's id
must add one to its own count alone.  So ops are not recognised one by one, but tried with each id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.order import itself

from ..arguments import bound, op_name
from ..run import run_on_cpu
from .region import ROWS, Unfit, row_by_row

_FILLS = ("aten.ones", "aten.ones_like", "aten.new_ones", "aten.full", "aten.full_like", "aten.new_full")


def ends_of_experts(
    offs: Node, ids: set[Node], sorted_ids: set[Node], experts: int, beyond: Sequence[int]
) -> bool:  # fmt: skip
    """Whether offs[e] is the number of rows whose id is at most e, for ids 0..experts - 1, and others do not count.

    ids: nodes with these ids.  sorted_ids: nodes with the same in order.  beyond: others that there may be.
    """
    counts = itself(offs)
    if op_name(counts) != "aten.cumsum" or counts.meta["val"].ndim != 1:
        return False
    rows = _summed(itself(counts.args[0]))
    given = ids | sorted_ids
    if rows is None or not _row_by_row(rows, given):
        return False
    like = next(iter(ids)).meta["val"]
    length = facts.at_one(facts.shape(like)[0])

    def counted(ids: Tensor) -> Any:
        found = _value(offs, dict.fromkeys(given, ids))
        return found.tolist() if isinstance(found, Tensor) else None

    for expert in range(experts):
        if counted(torch.full((length,), expert, dtype=like.dtype)) != [length * (e >= expert) for e in range(experts)]:
            return False
    others = [n for n in beyond if n <= torch.iinfo(like.dtype).max]
    others += others[-1:] * (-len(others) % length)
    return all(_count_nothing(counted, ids) for ids in torch.tensor(others, dtype=like.dtype).view(-1, length))


def _count_nothing(counted: Callable[[Tensor], Any], ids: Tensor) -> bool:
    """Whether these ids count nowhere, or the program fails with them."""
    try:
        return not any(counted(ids) or [1])
    except (RuntimeError, IndexError):
        return ids.unique().numel() == 1 or all(_count_nothing(counted, i.expand(ids.shape)) for i in ids)


def no_experts(experts: int) -> list[int]:
    """Ids that are no expert's, among them those that a narrower dtype or a remainder takes for one."""
    near = range(experts, experts + 1024)
    far = [2**k + j for k in (15, 16, 24, 31, 32, 48, 62) for j in range(-1, experts + 1)]
    return [-1, *near, *(n for n in far if n >= experts + 1024)]


def _summed(counts: Any) -> Node | None:
    """Of what each row has, a node `[R, ..]`, if a node is its sum over the rows."""
    if not isinstance(counts, Node) or counts.op != "call_function":
        return None
    given, name = bound(counts), op_name(counts)
    if name == "aten.histc" and given["min"] != given["max"]:
        return given["self"]  # type: ignore[no-any-return]
    if name == "aten.bincount" and given["weights"] is None:
        return given["self"]  # type: ignore[no-any-return]
    if name == "aten.sum" and given.get("dim") in ([0], (0,)):
        return given["self"]  # type: ignore[no-any-return]
    if name in ("aten.index_add", "aten.scatter_add") and given["dim"] in (0, -1):
        added = given.get("source") or given.get("src")
        if isinstance(added, Node) and op_name(added) in _FILLS:
            return given["index"]  # type: ignore[no-any-return]
    return None


def _row_by_row(rows: Node, given: set[Node]) -> bool:
    """Whether each row of a value is made of the id of that row alone."""
    if rows in given:
        return True
    above = facts.ancestors([rows], through=lambda n: n not in given)
    made = [n for n in rows.graph.nodes if n in above and n not in given and any(m in above for m in n.all_input_nodes)]
    own = dict.fromkeys(n for n in made if isinstance(n.meta.get("val"), Tensor))
    inputs: dict[Node, tuple[Tensor, int | None]] = {}
    for n in dict.fromkeys(m for node in own for m in node.all_input_nodes if m not in own):
        value = n.meta.get("val")
        if not isinstance(value, Tensor) or (n not in given and any(s.free_symbols for s in facts.shape(value))):
            return False
        shape = [ROWS] if n in given else list(value.shape)
        inputs[n] = torch.empty(shape, dtype=value.dtype, device="meta"), 0 if n in given else None
    if not any(n in inputs for n in given):
        return False
    try:
        found = row_by_row([*own], inputs, {})[rows].axes
    except Unfit:
        return False
    return isinstance(found, SampleAxis) and found == SampleAxis(0)


def _value(node: Node, known: Mapping[Node, Any]) -> Any:
    """The value of a node for one sample, of numbers and ids alone; None if it reads anything else."""
    values: dict[Node, Any] = dict(known)
    above = facts.ancestors([node], through=lambda n: n not in known)
    for n in (n for n in node.graph.nodes if n in above and n not in values):
        value = n.meta.get("val")
        if isinstance(value, (torch.SymInt, int)):
            values[n] = facts.at_one(value)
            continue
        if n.op != "call_function" or any(values.get(m) is None for m in n.all_input_nodes):
            return None
        values[n] = run_on_cpu(n, values)
    return values[node]
