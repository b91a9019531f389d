"""`psg_fx.microbatch`: large batches in parts, within the memory of one part."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from psg_fx.api import LossModule, PerSampleModule, StepOutput
from psg_fx.arguments import Call
from psg_fx.errors import BadArgument
from psg_fx.progress import Progress
from psg_fx.quantity import Join

Report = bool | Callable[[int, int], None]


def _nothing(done: int, total: int) -> None:
    """No display."""


def microbatch(step: PerSampleModule, size: int, *, progress: Report = False) -> Callable[..., StepOutput]:
    """A function that is called as the step is, runs it on parts of at most `size` samples, and joins the outputs.

    Sums are accumulated in the result of the first part, and means in one tensor more, so the memory is that of one
    part however large the batch is; what has a row for every sample grows with the batch.  Inputs are cut along
    `batch_dim`, as are weights; what all samples share is not. Buffers that forward writes hold afterwards what
    consecutive ordinary forwards on the parts leave there. If B is not a multiple of `size`, the last part is
    smaller, and is another batch size to compile for, unless the step was made with `dynamic=True`.

    Args:
        step: what `transform` returns for a model with a loss.
        size: the largest number of samples in one part.
        progress: True: a line on stderr, where that is a terminal; or a function of (parts done, parts in all).

    Raises:
        BadArgument: a step without a loss, a size that is no positive int, or a quantity that parts do not tell; when
            called, weights for another number of samples.
    """
    if not isinstance(step, LossModule):
        raise BadArgument(
            f"{type(step).__name__} is not a step with a loss", where="microbatch(step, size)",
            why="only such a step has outputs that can be joined", fix="pass what transform(model, loss_fn) returns",
        )  # fmt: skip
    if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
        raise BadArgument(
            f"size={size!r} is not a number of samples", where="microbatch(step, size)",
            why="each part holds so many samples", fix="a positive int",
        )  # fmt: skip
    size = operator.index(size)
    _joins(step)
    line = Progress(progress is True)
    report = progress if callable(progress) else lambda done, total: line.say(f"{done} of {total} parts")

    def run(inputs: Any, *targets: Any, **given: Any) -> StepOutput:
        """The output of the step for the whole batch."""
        call = step._take_apart(inputs, *targets)
        if call.batch_size() <= size:
            whole: StepOutput = step(inputs, *targets, **given)
            return whole
        try:
            return run_in_parts(step, call, given, size, report)
        finally:
            line.say("")

    return run


def run_in_parts(
    step: LossModule, call: Call, given: Mapping[str, Any], size: int, report: Callable[[int, int], Any] = _nothing
) -> StepOutput:
    """The output of the step for a call, from parts of at most `size` samples."""
    count = call.batch_size()
    _check_each(step, given, count)
    joined = Joined(_joins(step), count, step.settings.reuse_outputs)
    starts = range(0, count, size)
    for done, start in enumerate(starts, 1):
        part = slice(start, min(start + size, count))
        joined.add(step(*_cut(call, part), **_cut_given(step, given, part)), part)
        report(done, len(starts))
    return StepOutput(joined.fields)


def _joins(step: LossModule) -> dict[str, Join]:
    found: dict[str, Join] = {"losses": "cat"}
    for quantity in step.settings.quantities:
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


def _each(step: LossModule) -> set[str]:
    """What is given for every sample."""
    return {name for quantity in step.settings.quantities for name in quantity.reads_each}


def _check_each(step: LossModule, given: Mapping[str, Any], count: int) -> None:
    """Refuse what is given for another number of samples: parts would be cut out of it that fit."""
    for name in _each(step) & set(given):
        shape = tuple(torch.as_tensor(given[name]).shape)
        if shape != (count,):
            raise BadArgument(
                f"{name} have shape {shape}", where=f"microbatch(step, size)(inputs, targets, {name}=...)",
                why=f"there is one for each of the {count} samples", fix="pass a [B] tensor",
            )  # fmt: skip


def _cut_given(step: LossModule, given: Mapping[str, Any], part: slice) -> dict[str, Any]:
    each = _each(step)
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


__all__ = ["microbatch"]
