"""The groups of a call's samples: `step(x, y, groups=ids, num_groups=G)`.

The graph is for groups that have members, in order, and one more that has none if there are such: its rows are those
of all empty ones.  So a million users of whom a batch has ten cost what ten do.  A quantity of the user's own may look
at all rows at once (a median, ranks), so beside one the graph has every group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psg_fx.algebra.asks import FLOORS
from psg_fx.algebra.members import IDS, MEMBERS, Grouping
from psg_fx.errors import BadArgument, first_line
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.step.constants import Constants, no_plain_numbers
from psg_fx.tensors import as_int, is_of_ints, short_name

_SPARSE, _FEW = 4, 16
"""Rows are brought in order as long as that takes at most so many times as many places as there are rows, or so few."""

_COMPARED = 128
"""Samples whose groups are compared as numbers of Python: to launch a kernel takes as long."""

_MOST = 10**7
"""Groups that nobody has counted; beyond, their numbers are taken for names."""

_WHERE = "step(inputs, targets, groups=...)"


@dataclass(frozen=True)
class Groups:
    """The groups of one call.

    count: G.  ids: the group of each sample, [B].  members: the samples of each group of the graph, [G', S], -1 where
    there is none; None where nobody reads them.  rows: the graph's group of each sample, [B]; None: as ids.
    kept: numbers of the groups that the graph has, [G'], the first for one without samples; slots: the graph's group of
    each of the G; both None where they are the same.
    sound: NaN where a number is out of range that nobody could look at, else 1; None where all are seen.
    """

    grouping: Grouping
    count: int
    ids: Tensor
    members: Tensor | None = None
    kept: Tensor | None = None
    slots: Tensor | None = None
    rows: Tensor | None = None
    sound: Tensor | None = None

    def given(self, value: Tensor) -> Tensor:
        """What is given for every group, for those of the graph."""
        if self.kept is None:
            return value
        return (
            value.index_select(0, self.kept.to(value.device))
            if self.count
            else value.new_zeros(len(self.kept), *value.shape[1:])
        )

    def of_samples(self, value: Tensor) -> Tensor:
        """What is true of groups, [G], for each sample; one of no group counts as false."""
        ids = self.ids.to(value.device)
        return torch.cat([value.new_zeros(1), value])[ids + 1]

    @functools.cached_property
    def _few(self) -> list[int] | None:
        """The group of each of few samples."""
        return self.ids.tolist() if len(self.ids) <= _COMPARED else None

    def are(self, ids: Tensor) -> bool:
        """Whether these are the groups of as many samples.  Few numbers are compared sooner in Python."""
        return torch.equal(ids, self.ids) if self._few is None else bool(ids.tolist() == self._few)

    @property
    def of_each(self) -> Tensor:
        """The graph's group of each sample, [B], -1 for none."""
        return self.ids if self.rows is None else self.rows

    def inputs(self, device: torch.device, of_each: bool, constants: Constants) -> dict[str, Tensor]:
        """What the graph reads of the groups, on a device that is not waited for.  of_each: the group of each sample
        is among that.
        """
        if self.members is None:
            largest = self.grouping.largest if self.grouping.layout == "blocks" else 1
            members = constants.unread(MEMBERS.name, self.grouping.groups, largest, device)
        else:
            members = _sent(self.members, device)
        found = {MEMBERS.name: members}
        return {**found, IDS.name: _sent(self.of_each, device)} if of_each else found

    def every(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        """A result with groups of the graph in `dims`, with all groups there."""
        if self.slots is not None:
            for dim in dims:
                value = value.index_select(dim, self.slots.to(value.device))
        return value if self.sound is None else value * self.sound.to(value.dtype)


def _sent(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, non_blocking=True)


def groups_of(
    ids: Any, num_groups: Any, samples: int, former: Groups | None = None, apart: bool = False
) -> Groups:  # fmt: skip
    """The groups of a call with so many samples.  former: of another call, in blocks, which may be those of this one.
    apart: the graph has a row for each group, also for those without samples.

    Raises BadArgument.
    """
    found = _numbers(ids, samples)
    given = None if num_groups is None else _checked_count(num_groups)
    if found.device.type != "cpu":
        if found.is_cuda and given is not None:
            return unseen(found, given)
        found = found.cpu()
    if former is not None and given in (None, former.count) and former.are(found):
        return former
    if samples and (blocks := _in_blocks(found, given)) is not None:
        return blocks
    least, most = (-1, -1) if not samples else (int(n) for n in found.aminmax())
    count = most + 1 if given is None else given
    if least < -1 or most >= count:
        raise BadArgument(
            f"groups has the number {least if least < -1 else most}", where=_WHERE,
            why=("they are" if given is None else f"there are {given} groups,") + " counted from 0, and -1 is for none",
            fix="number the groups from 0" if least < -1 else f"pass num_groups={most + 1} or more, or leave it out",
        )  # fmt: skip
    if given is None and count > _MOST:
        raise BadArgument(
            f"groups has the number {most}", where=_WHERE,
            why=f"results would have a row for each of {count} groups, for {samples} samples",
            fix="number the groups of the batch: torch.unique(groups, return_inverse=True)[1]; or pass num_groups",
        )  # fmt: skip
    return _gathered(found, count, least < 0, apart)


def _in_blocks(ids: Tensor, given: int | None) -> Groups | None:
    """The groups if all are as large and lie in order."""
    samples, count = len(ids), int(ids[-1]) + 1 if given is None else given
    if count < 1 or samples % count:
        return None
    with torch.inference_mode(False):  # they may serve a later call
        own = torch.arange(samples, device="cpu").div_(samples // count, rounding_mode="floor")
    return Groups(Grouping("blocks", count, samples // count, samples), count, own) if torch.equal(ids, own) else None


def unseen(ids: Tensor, count: int) -> Groups:
    """Groups by numbers that are not looked at, since that would wait for their device."""
    valid = (ids >= -1) & (ids < count)
    sound = torch.where(valid.all(), 1.0, math.nan)
    kept = torch.zeros(1, dtype=torch.int64, device=ids.device) if not count else None
    slots = None if count else torch.zeros(0, dtype=torch.int64, device=ids.device)
    grouping = Grouping("scattered", max(count, 1), -(-len(ids) // max(count, 1)), len(ids))
    rows = torch.where(valid, ids, -1)
    return Groups(grouping, count, rows, None, kept, slots, rows, sound)


def _gathered(ids: Tensor, count: int, none: bool, apart: bool) -> Groups:
    """Groups whose members lie anywhere.  none: some samples are in none."""
    samples = len(ids)
    try:
        counts = torch.bincount(ids + 1, minlength=count + 1)[1:] if none else torch.bincount(ids, minlength=count)
    except RuntimeError as error:
        raise BadArgument(
            f"there is no memory for {count} groups", where=_WHERE, why=first_line(error),
            fix="number the groups of the batch: torch.unique(groups, return_inverse=True)[1]",
        ) from error  # fmt: skip
    fewest, largest = (int(n) for n in counts.aminmax()) if count else (0, 0)
    kept, slots, rows = None, None, ids
    if not fewest and not (apart and count):
        has = counts > 0
        first = (~has).nonzero()[:1, 0] if count else counts.new_zeros(1)
        kept = torch.cat([first, has.nonzero()[:, 0]])
        slots = torch.where(has, has.cumsum(0), 0)
        counts = counts[kept] if count else counts.new_zeros(1)
        rows = torch.where(ids < 0, -1, slots[ids.clamp(min=0)]) if count else ids
    groups, largest = len(counts), max(largest, 1)
    if not fits_in_order(groups * largest, samples):
        return Groups(Grouping("scattered", groups, largest, samples), count, ids, None, kept, slots, rows)
    members = in_order(rows, counts, largest)
    return Groups(Grouping("gathered", groups, largest, samples), count, ids, members, kept, slots, rows)


def fits_in_order(places: int, rows: int) -> bool:
    """Whether so many places are few enough to bring so many rows in order."""
    return places <= max(_SPARSE * rows, _FEW)


def in_order(ids: Tensor, counts: Tensor, largest: int) -> Tensor:
    """The rows of each of those that ids are numbers of, [G, S], -1 where there are fewer than S; a row whose id is -1
    is in none.  In memory the first rows of all lie side by side, then the second ones: a sum over the rows of each is
    then a loop over places, whose inner one goes along a row.

    counts: how many rows each has, [G].  largest: S.
    """
    ends = counts.cumsum(0)
    total = int(ends[-1])
    moved = len(ids) > 0 and bool(ids[0] < 0 or (ids[1:] < ids[:-1]).any())
    order = ids.argsort(stable=True)[len(ids) - total :] if moved else None
    if total == len(counts) * largest:  # all have as many
        rows = torch.arange(total, device=ids.device) if order is None else order
        return rows.view(len(counts), largest).t().contiguous().t()
    places = torch.arange(largest, device=ids.device).unsqueeze(1)
    found = torch.where(places < counts, (ends - counts) + places, -1)
    if order is not None and total:
        found = torch.where(found < 0, -1, order[found])
    return found.t()


def _numbers(ids: Any, samples: int) -> Tensor:
    """The group of each sample as int64."""
    try:
        found = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise _bad_ids(f"a {type(ids).__name__} that is no list of numbers", samples) from error
    if kind := no_plain_numbers(found):
        raise _bad_ids(kind, samples)
    if type(found) is Tensor and found.dtype is torch.int64 and tuple(found.shape) == (samples,):
        return found
    if not is_of_ints(found.dtype) and found.numel():  # an empty list is one of floats
        raise _bad_ids(f"of {short_name(found.dtype)}", samples)
    if tuple(found.shape) != (samples,):
        raise _bad_ids(f"of shape {tuple(found.shape)}", samples)
    return found.detach().to(torch.int64)


def _bad_ids(what: str, samples: int) -> BadArgument:
    return BadArgument(
        f"groups is {what}", where=_WHERE, why=f"it says the group of each of the {samples} samples",
        fix="pass a [B] tensor of ints, from 0 to num_groups - 1, -1 for a sample of no group",
    )  # fmt: skip


def no_groups() -> BadArgument:
    """The error for no groups at all, where a row that stands for none would be taken for one."""
    return BadArgument(
        "there are no groups", where=_WHERE,
        why="a quantity of your own would see the row of a group that is not there",
        fix="leave such a batch out",
    )  # fmt: skip


def _checked_count(num_groups: Any) -> int:
    count = as_int(num_groups)
    if count is None or count < 0:
        raise BadArgument(
            f"num_groups={num_groups!r} is not a number of groups", where="step(inputs, targets, num_groups=...)",
            why="results have a row for each group", fix="pass an int, or leave it out: groups.max() + 1",
        )  # fmt: skip
    return count


def factors_of_nothing(quantities: Iterable[Quantity], output: Any, extras: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of groups that no sample is in, where they are not zero: what a clipped sum would multiply them with."""
    found: dict[str, Any] = {}
    for quantity in quantities:
        if isinstance(quantity, ClippedSum):
            norms = output.clip_factors if quantity.per == "parameter" else {"": output.clip_factors}
            factors = quantity.weights({"sq_norms": norms, FLOORS: {}}, extras)["factors"]
            found["clip_factors"] = dict(factors) if quantity.per == "parameter" else factors[""]
    return found
