"""A batch in parts, one after the other: how it is cut, and how the outputs are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from psg_fx.errors import BadArgument
from psg_fx.program.call import Call
from psg_fx.quantities.base import Join
from psg_fx.step.compiled import StepOutput
from psg_fx.step.settings import Settings


def run_in_parts(
    step: Callable[..., StepOutput], settings: Settings, call: Call, given: Mapping[str, Any], size: int,
    report: Callable[[int, int], Any],
) -> StepOutput:  # fmt: skip
    """The output of the step for a call, from parts of at most `size` samples."""
    count = call.batch_size()
    _check_each(settings, given, count)
    joined = Joined(joins(settings), count, settings.reuse_outputs)
    starts = range(0, count, size)
    for done, start in enumerate(starts, 1):
        part = slice(start, min(start + size, count))
        joined.add(step(*_cut(call, part), **_cut_given(settings, given, part)), part)
        report(done, len(starts))
    return StepOutput(joined.fields, settings.joins_of_processes)


def joins(settings: Settings) -> dict[str, Join]:
    """How each field of the output follows from those of parts."""
    found: dict[str, Join] = {"losses": "cat"}
    for quantity in settings.quantities:
        if not quantity.joins():
            raise BadArgument(
                f"{quantity} of a batch does not follow from those of its parts", where="microbatch(step, size)",
                why="it is neither a row for every sample, nor a sum or a mean over samples",
                fix="leave it out of quantities, or run the batch in one piece",
            )  # fmt: skip
        found |= quantity.joins()
    return found


def _cut(call: Call, part: slice) -> Iterator[Any]:
    """The inputs of one part, and its targets if there are any."""
    length = part.stop - part.start
    tensors = [
        t if dim is None else t.narrow(dim, part.start, length) for t, dim in zip(call.tensors, call.dims, strict=True)
    ]
    for arguments, keywords in call.rebuild(tensors):
        if arguments or keywords:
            yield arguments or keywords


def _each(settings: Settings) -> set[str]:
    """What is given for every sample."""
    return {name for quantity in settings.quantities for name in quantity.reads_each}


def _check_each(settings: Settings, given: Mapping[str, Any], count: int) -> None:
    """Refuse what is given for another number of samples: parts would be cut out of it that fit."""
    for name in _each(settings) & set(given):
        shape = tuple(torch.as_tensor(given[name]).shape)
        if shape != (count,):
            raise BadArgument(
                f"{name} have shape {shape}", where=f"microbatch(step, size)(inputs, targets, {name}=...)",
                why=f"there is one for each of the {count} samples", fix="pass a [B] tensor",
            )  # fmt: skip


def _cut_given(settings: Settings, given: Mapping[str, Any], part: slice) -> dict[str, Any]:
    each = _each(settings)
    return {name: value[part] if name in each else value for name, value in given.items()}


class Joined:
    """The fields of a batch, filled part by part.  overwritten: a part's tensors live only until the next part."""

    def __init__(self, joins: Mapping[str, Join], count: int, overwritten: bool) -> None:
        self._joins, self._count, self._overwritten = joins, count, overwritten
        self._own: set[int] = set()
        self.fields: dict[str, Any] = {}

    def add(self, output: StepOutput, part: slice) -> None:
        """Take in the output of one part."""
        for field, value in vars(output).items():
            join = self._joins[field]
            if isinstance(value, torch.Tensor):
                self.fields[field] = self._joined(self.fields.get(field), value, join, part)
            else:
                total = self.fields.setdefault(field, {})
                for name, tensor in value.items():
                    total[name] = self._joined(total.get(name), tensor, join, part)

    def _joined(self, total: torch.Tensor | None, value: torch.Tensor, join: Join, part: slice) -> torch.Tensor:
        if join == "cat":
            if total is None:
                total = value.new_empty((self._count, *value.shape[1:]))
            total[part] = value
            return total
        share = (part.stop - part.start) / self._count if join == "mean" else 1.0
        if total is None:
            return self._owned(value) if join == "sum" else value * share
        return total.add_(value, alpha=share)

    def _owned(self, value: torch.Tensor) -> torch.Tensor:
        """The value itself, or a copy where its memory is another total's too, or will be written by the next part."""
        start = value.untyped_storage().data_ptr()
        shared = start in self._own or (self._overwritten and value.is_cuda)
        self._own.add(start)
        return value.clone() if shared else value
