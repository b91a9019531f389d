"""The rows of a call's samples, or of groups of these, brought in order for the parameters where that pays.

With `members` [B, S], the rows of each sample, a sample is one with S places, and every tree is as it is for samples
that have a dim of their own.  They are found on the CPU alone: on a device, how many rows the largest sample has is not
known without waiting for it, and rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psg_fx.algebra.members import members_of
from psg_fx.program.arguments.call import Call
from psg_fx.step.groups import Groups, fits_in_order, in_order


@dataclass(frozen=True)
class Counted:
    """The rows of an axis, which may be brought in order.

    ids: whose each is.  counts: how many each sample (or group) has.  largest: the most.
    """

    ids: Tensor
    counts: Tensor
    largest: int

    def members(self) -> Tensor:
        """The rows of each sample or group, `[B, S]`, -1 where there is none."""
        if not self.largest:
            return self.ids.new_empty(len(self.counts), 0)
        return in_order(self.ids, self.counts, self.largest)


@dataclass(frozen=True)
class RowsOfCall:
    """The rows of each axis; None for one whose rows stay where they are."""

    axes: tuple[Counted | None, ...] = ()

    @property
    def largest(self) -> tuple[int | None, ...]:
        """The S of each axis."""
        return tuple(None if rows is None else rows.largest for rows in self.axes)

    def inputs(self, read: Container[str]) -> dict[str, Tensor]:
        """What a graph reads of them.  read: the names of its further inputs."""
        named = {members_of(k).name: rows for k, rows in enumerate(self.axes) if rows is not None}
        return {name: rows.members() for name, rows in named.items() if name in read}


_NONE = RowsOfCall()


def rows_of(call: Call, groups: Groups | None = None) -> RowsOfCall:
    """The rows of the samples of a call, or of groups of these."""
    if not call.axes:
        return _NONE
    if call.tensors[-1].device.type != "cpu":
        return RowsOfCall((None,) * len(call.axes))
    return RowsOfCall(tuple(_rows(ids, call.batch_size(), groups) for ids in _ids(call)))


def _ids(call: Call) -> Sequence[Tensor | None]:
    """The ids of each axis, where they can be had outside of the graph."""
    try:
        with torch.no_grad():
            return call.ids(call.tensors)
    except (RuntimeError, IndexError):  # they point outside: the conditions in the graph say where
        return (None,) * len(call.axes)


def _rows(ids: Tensor | None, samples: int, groups: Groups | None) -> Counted | None:
    """The rows of an axis; None where they would take too much room in order, or the ids are none."""
    if ids is None or not samples:
        return None
    rows, asked = len(ids), samples if groups is None else groups.grouping.groups
    if not rows:
        return Counted(ids, ids.new_zeros(asked), 0)
    least, most = (int(n) for n in ids.aminmax())
    if least < 0 or most >= samples:
        return None
    if groups is not None:
        ids = groups.of_each.to(ids.device).index_select(0, ids)
    counts = torch.bincount(ids + 1, minlength=asked + 1)[1:]
    largest = int(counts.max())
    return Counted(ids, counts, largest) if fits_in_order(asked * largest, rows) else None
