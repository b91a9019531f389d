"""Rows of all samples that are written into a tensor of as many: `t = torch.zeros(2 * B); t[:B] = 1`, as labels are.

What is written takes a whole number of rows of each sample, and the tensor is a fill, or was written in this way
before: then it is one part after the other, `torch.cat([ones(B), zeros(B)])`, in which each part holds the samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.nodes import batch_size, call, filled_with, written_before

from ..arguments import bound

aten = torch.ops.aten


@dataclass(frozen=True)
class _Part:
    """`each` rows of every sample: those of a node, or a piece of a fill."""

    node: Node
    each: int
    is_fill: bool


def write_one_after_the_other(gm: GraphModule) -> None:
    """Rewrite writes of such parts.  What cannot be rewritten stays, to be refused."""
    if not any(node.target is aten.slice_scatter.default for node in gm.graph.nodes):
        return
    written = _Written(gm)
    for node in list(gm.graph.nodes):
        written.see(node)
    if written.found:
        gm.graph.eliminate_dead_code()
        gm.recompile()


class _Written:
    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.found = gm, False
        self.batch = facts.graph_facts(gm).batch
        self.parts: dict[Node, list[_Part]] = {}

    def see(self, node: Node) -> None:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or not value.ndim:
            return
        each = self.multiple(facts.shape(value)[0])
        if not each or any(size.free_symbols for size in facts.shape(value)[1:]):
            return
        if filled_with(node) is not None:
            self.parts[node] = [_Part(node, each, True)]
        elif node.target in (aten.slice.Tensor, aten.slice_scatter.default):
            self.written(node, each)

    def written(self, node: Node, each: int) -> None:
        """A part that is taken, of a fill alone, or written."""
        given = bound(node)
        parts = self.parts.get(given["self"])
        if parts is None or given["dim"] not in (0, -node.meta["val"].ndim) or given["step"] != 1:
            return
        whole = sum(part.each for part in parts)
        start, end = self.place(given["start"], whole, 0), self.place(given["end"], whole, whole)
        if start is None or end is None:
            return
        if node.target is aten.slice.Tensor:
            if len(parts) == 1 and parts[0].is_fill and end - start == each:
                self.put(node, [replace(parts[0], each=each)])
            return
        before, after = _until(parts, start), _from(parts, max(start, end))
        if before is None or after is None:
            return
        source = self.cast(given["src"], node)
        middle = self.parts.get(source) or [_Part(source, max(end - start, 0), False)]
        self.put(node, [part for part in (*before, *middle, *after) if part.each])

    def put(self, node: Node, parts: list[_Part]) -> None:
        with written_before(node, node.meta):
            made = [self.fill(part) if part.is_fill else part.node for part in parts]
            new = call(self.gm, aten.cat.default, made) if len(made) > 1 else made[0]
        new.meta["val"] = node.meta["val"]
        self.parts[new] = parts
        node.replace_all_uses_with(new)
        self.found = True

    def cast(self, rows: Node, onto: Node) -> Node:
        """Rows as they are once they are written into a node."""
        dtype = onto.meta["val"].dtype
        if rows.meta["val"].dtype is dtype:
            return rows
        with written_before(onto, onto.meta):
            return call(self.gm, aten._to_copy.default, rows, dtype=dtype)

    def fill(self, part: _Part) -> Node:
        """As many rows of a fill."""
        value = part.node.meta["val"]
        number = filled_with(part.node)
        rows = self.rows(part.each)
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        shape: list[Any] = [rows, *(int(size) for size in facts.shape(value)[1:])]
        made = self.gm.graph.call_function(aten.full.default, (shape, number), options)
        with value.fake_mode:
            made.meta["val"] = torch.full([rows.meta["val"], *shape[1:]], 0, dtype=value.dtype, device=value.device)
        return made

    def rows(self, each: int) -> Node:
        """The number of rows of all samples."""
        found = batch_size(self.gm, each)
        assert found is not None
        return found

    def multiple(self, size: Any) -> int | None:
        """How many rows of each sample a number of rows is."""
        value = size.meta["val"] if isinstance(size, Node) else size
        found = (facts.expr(value) if isinstance(value, (int, torch.SymInt)) else value) / self.batch
        return int(found) if found.is_Integer else None

    def place(self, given: Any, whole: int, default: int) -> int | None:
        """Where a part begins or ends, in rows of each sample; whole: how many there are."""
        if given is None or (isinstance(given, int) and given == _LAST):
            return default
        found = self.multiple(given)
        return found if found is None else min(max(found + whole if found < 0 else found, 0), whole)


_LAST = 2**63 - 1


def _until(parts: list[_Part], end: int) -> list[_Part] | None:
    """The first rows; None where these would be a piece of a node."""
    found, at = [], 0
    for part in parts:
        taken = min(part.each, max(end - at, 0))
        if 0 < taken < part.each and not part.is_fill:
            return None
        found.append(replace(part, each=taken))
        at += part.each
    return found


def _from(parts: list[_Part], start: int) -> list[_Part] | None:
    """The last rows."""
    found = _until(parts[::-1], sum(part.each for part in parts) - start)
    return None if found is None else found[::-1]
