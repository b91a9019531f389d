"""As many rows for every sample in place of those that a mask picks.

A row that the mask does not pick is replaced by the first one of its sample that it picks; where it picks none, by a
number, or of integers by a row of another sample.  Where rows are summed, such rows count zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxis
from psg_fx.graph.splicing import splice
from psg_fx.op_table import known
from psg_fx.ops.some_row import some_row
from psg_fx.source import provenance
from psg_fx.torch_private.modes import enable_python_dispatcher

from ..arguments import bound
from ..run import run_node
from ..values import Result
from .picked import Picked, asserts, is_number, pick_place
from .spare import count_nothing
from .sums import apart, together


class Padding:
    """The rewriting of what is computed from the rows of one mask.

    new: a node with such rows -> the one with padded rows.
    """

    def __init__(self, picked: Picked, number: int) -> None:
        self.picked, self.number = picked, number
        self.gm, self.rows, self.ragged = picked.gm, picked.rows, picked.ragged
        self.new: dict[Node, Node] = {}

    def run(self) -> None:
        """Write the padded program, once it is proven that rows stay apart."""
        axes = self.picked.proven()
        sinks = self.picked.sinks(axes)
        valid, place = self.valid_rows()
        for node in self.picked.order:
            if node in self.rows.picks:
                self.new[node] = self.padded(node, place)
            elif node in self.ragged and not isinstance(node.meta["val"], (torch.SymBool, bool)):
                self.new[node] = self.copied(node)
            elif node in sinks:
                node.replace_all_uses_with(self.summed(node, axes, valid))
        rows = {
            self.new[n]: found.axes for n, found in axes.items() if n in self.new and isinstance(found.axes, SampleAxis)
        }
        count_nothing(self.gm, rows, lambda: splice(self.gm, place.next, _has_rows, [place]))
        self.erase()

    def valid_rows(self) -> tuple[Node, Node]:
        """Which of the padded rows the mask picks, `[B·S]`; and for each the row of its sample that it takes,
        `[B, S]`, or -1 where the sample has none.
        """
        rows, shape = self.rows, self.rows.shape

        def function(mask: Tensor) -> tuple[Tensor, Tensor]:
            each = apart(mask.expand(shape) if shape is not None else mask, rows.axis)
            own = torch.arange(each.shape[1], device=mask.device)
            first = each.to(torch.int64).argmax(1, keepdim=True)
            place = torch.where(each, own, first)
            return each.reshape(-1), torch.where(each.any(1, keepdim=True), place, -1)

        valid, place = splice(self.gm, rows.picks[0], function, [rows.mask])
        return valid, place

    def padded(self, pick: Node, place: Node) -> Node:
        """`[.., B·S, ..]`: the rows that the mask picks, and copies of them."""
        rows, at, shape = self.rows, pick_place(pick), self.rows.shape
        width = len(shape) if shape is not None else rows.mask.meta["val"].ndim
        fill = 0.3 + 0.07 * self.number + 0.11 * rows.picks.index(pick)  # where a sample has no row: no special value

        def function(x: Tensor, place: Tensor) -> Tensor:
            x = x.expand(shape) if shape is not None else x
            lead, trail = x.shape[:at], x.shape[at + width :]
            count = math.prod(x.shape[at : at + width]) // place.shape[1] if rows.axis is None else place.shape[0]
            moved = together(x, rows.axis, at, width)  # [B, L, S, R]
            index = place.clamp(min=0)[:, None, :, None].expand(moved.shape)
            taken = moved.gather(2, index)
            if facts.is_differentiable(x):
                other = torch.full((), fill, dtype=x.dtype, device=x.device)
            else:
                other = some_row(moved.transpose(1, 2), place)[:, None]
            taken = torch.where((place >= 0)[:, None, :, None], taken, other)
            return taken.transpose(0, 1).reshape(*lead, count * place.shape[1], *trail)

        found: Node = splice(self.gm, pick, function, [pick.args[0], place])  # type: ignore[list-item]
        return found

    def copied(self, node: Node) -> Node:
        """The same op on padded rows."""
        with self.gm.graph.inserting_before(node):
            fresh = self.gm.graph.node_copy(node, lambda n: self.new.get(n, n))
        fresh.meta = provenance(node)
        fakes = self.rows.picks[0].meta["val"].fake_mode  # some make tensors of numbers, as ones for all rows
        with fakes, enable_python_dispatcher(), torch.no_grad():
            fresh.meta["val"] = run_node(fresh)
        return fresh

    def summed(self, node: Node, axes: Mapping[Node, Result], valid: Node) -> Node:
        """A sum over rows of which some count zero; or an op whose number of rows is counted."""
        numbers = [n for n in node.all_input_nodes if n in self.ragged and is_number(n)]
        if numbers:
            return self.counted(node, numbers, valid)
        (source,) = [n for n in node.all_input_nodes if n in self.ragged]
        axis = axes[source].axes
        if not isinstance(axis, SampleAxis):
            raise AssertionError(f"no rows in {source}")
        function = known(node.target).over_kept_rows
        assert function is not None
        named = {key: value for key, value in bound(node).items() if key != "self"}

        def run(x: Tensor, valid: Tensor) -> Tensor:
            rows = valid.view(1, -1, 1).expand(axis.outer, valid.shape[0], axis.inner).reshape(-1)
            kept = rows.view([-1 if d == axis.dim else 1 for d in range(x.ndim)])
            found: Tensor = function(x, kept, **named)
            return found

        found: Node = splice(self.gm, node, run, [self.new[source], valid])
        return found

    def counted(self, node: Node, numbers: Sequence[Node], valid: Node) -> Node:
        tensors = [n for n in node.all_input_nodes if n not in numbers]

        def run(valid: Tensor, *values: Tensor) -> Any:
            known: dict[Node, Any] = dict(zip(tensors, values, strict=True))
            known |= {n: self.picked.number(n, valid.sum()) for n in numbers}
            filled = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            return node.target(*filled[0], **filled[1]).to(node.meta["val"].dtype)  # type: ignore[operator]

        found: Node = splice(self.gm, node, run, [valid, *tensors])
        return found

    def erase(self) -> None:
        """Drop what has rows by number, and what export asserts of it."""
        for node in reversed(self.picked.order):
            if not node.users and (node in self.ragged or node in self.rows.picks or asserts(node)):
                if asserts(node) and not any(self.picked.knows(n) for n in node.all_input_nodes):
                    continue
                self.gm.graph.erase_node(node)


def _has_rows(place: Tensor) -> Tensor:
    """`[B·S]`: whether the sample of a row has any."""
    return (place >= 0).reshape(-1)
