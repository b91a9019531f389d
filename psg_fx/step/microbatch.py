"""`psg_fx.microbatch`: large batches in parts, within the memory of one part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psg_fx.errors import BadArgument
from psg_fx.progress import Progress
from psg_fx.step.arguments import ABSENT
from psg_fx.step.compiled import StepOutput
from psg_fx.step.mistakes import refuse_rows
from psg_fx.step.module import PerSampleModule
from psg_fx.step.parts import joins
from psg_fx.step.with_loss import LossModule
from psg_fx.tensors import as_int

Report = bool | Callable[[int, int], None]


def microbatch(step: PerSampleModule, size: int, *, progress: Report = False) -> Callable[..., StepOutput]:
    """A function that is called as the step is, runs it on parts of at most `size` samples, and joins the outputs.

    Sums are accumulated in the result of the first part, and means (and sums of half precision, in float32) in one
    tensor more, so the memory is that of one part however large the batch is; what has a row for every sample grows
    with the batch.  Inputs are cut along `batch_dim`, as are weights; what all samples share is not. Buffers that
    forward writes hold afterwards what consecutive ordinary forwards on the parts leave there. If B is not a multiple
    of `size`, the last part is smaller, and is another batch size to compile for, unless the step was made with
    `dynamic=True`.
    With `groups=`, rows of groups come from the part that has their samples; where several do, what is linear in the
    gradient is summed, and norms and what follows from them are refused.

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
    count = as_int(size)
    if count is None or count < 1:
        raise BadArgument(
            f"size={size!r} is not a number of samples", where="microbatch(step, size)",
            why="each part holds so many samples", fix="a positive int",
        )  # fmt: skip
    size = count
    joins(step.settings)
    line = Progress(progress is True)
    report = progress if callable(progress) else lambda done, total: line.say(f"{done} of {total} parts")

    def run(inputs: Any = ABSENT, targets: Any = ABSENT, *more: Any, out: StepOutput | None = None,
            **given: Any) -> StepOutput:  # fmt: skip
        """The output of the step for the whole batch.  out: a former output, as the step takes it."""
        if inputs is ABSENT or more:
            wrong: StepOutput = step(inputs, targets, *more, **given)  # which says what is wrong
            return wrong
        call = step._take_apart(inputs, targets)
        refuse_rows(call, "parts", "microbatch(step, size)", "pass batches of fewer rows to the step itself")
        if call.batch_size() <= size:
            whole: StepOutput = step(inputs, targets, out=out, **given)
            return whole
        try:
            return step.in_parts(call, given, size, out, report)
        finally:
            line.say("")

    return run
