"""Holds a compiled step against a float64 loop over single samples, and says which answer is worst.

The loop is the definition of a per-sample gradient; where samples are rows, it is over the losses of the whole batch.
The same loop in the model's own dtype shows how much of a difference is rounding, and `vmap(grad)` gives a second
opinion where it can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from psg_fx.errors import BadArgument, first_line
from psg_fx.reference.batch import has_rows
from psg_fx.reference.by_vmap import vmap_reference
from psg_fx.reference.definitions import GRADS, LOSSES, Answer, ByName, Definition, of_groups
from psg_fx.reference.loop import (
    Loss,
    computes_in_single,
    draws_random_numbers,
    loss_of_the_batch,
    reference_grads,
)
from psg_fx.reference.state import unchanged

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Default tolerance by the dtype of the parameters; ReLU kinks alone cost float32 a few 1e-4."""

FLOOR = 1e-3
"""Errors are relative to the largest reference value of the parameter, or to this fraction of the largest of all if
that is greater.

Some gradients are zero in exact arithmetic (the bias of an attention's keys): nothing is relative to those."""

SAME_LOSS = 1e-9
"""Losses in float64 that differ by less, relatively, are the same."""

NOISE_FACTOR = 10.0
"""An error is also accepted when the loop in the model's own dtype is wrong by a tenth of it; in float32, if a model in
float64 computes in that inside."""


@dataclass(frozen=True)
class ValidationRow:
    """One compared tensor: its largest relative error, the sample where it lies, and the verdict."""

    parameter: str
    max_error: float
    worst_sample: int | None
    verdict: str
    noise: float = 0.0
    asked: str = "grads"


@dataclass(frozen=True)
class ValidationReport:
    """All compared tensors, in the model's order; `str()` is a table headed by the worst of them."""

    rows: Sequence[ValidationRow]
    tolerance: float
    vmap: str
    notes: Sequence[str] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every compared tensor agrees."""
        return bool(self.rows) and all(row.verdict == "ok" for row in self.rows)

    @property
    def worst(self) -> ValidationRow:
        """The row with the largest error."""
        return max(self.rows, key=lambda row: row.max_error)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing was compared"
        bad = sum(row.verdict != "ok" for row in self.rows)
        head = (
            f"ok: {len(self.rows)} answers agree" if self.ok else f"WRONG: {bad} of {len(self.rows)} answers disagree"
        )
        worst = self.worst
        rows = [
            (r.asked, r.parameter, f"{r.max_error:.1e}", f"{r.noise:.1e}", r.worst_sample, r.verdict) for r in self.rows
        ]
        headers = ["asked", "parameter", "error", "rounding", "sample", "verdict"]
        table = tabulate(rows, headers, missingval="-", disable_numparse=True)
        bound = f"tolerance {self.tolerance:g}, or {NOISE_FACTOR:g} times the rounding"
        lines = [
            f"{head} with a float64 loop over samples ({bound})",
            f"worst: {worst.asked} {worst.parameter}, relative error {worst.max_error:.1e}",
            table,
            f"vmap: {self.vmap}",
        ]
        return "\n".join([*lines, *self.notes])


def validate(
    step: Callable[..., Any],
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any = None,
    *,
    batch_dim: Any = 0,
    params: Sequence[str] | None = None,
    checks: Sequence[Definition] = (LOSSES, GRADS),
    tolerance: float | None = None,
    notes: Sequence[str] = (),
    groups: Any = None,
    num_groups: int | None = None,
) -> ValidationReport:
    """Runs `step(inputs, targets)` once and compares the fields named by `checks` with the loop's.

    `step` is anything that returns an object with those fields; `definitions_for` makes the checks of given
    quantities. groups, num_groups: as in the call of a step. Buffers and attributes of modules are afterwards as they
    were. Raises `BadArgument` when the model draws random numbers,
    since no two ways of computing would agree.
    """
    if _draws(model, loss_fn, inputs, targets, batch_dim):
        raise BadArgument(
            "the model draws random numbers, so there is nothing to compare with",
            where="validate",
            why="two runs of the same sample gave different losses",
            fix="call model.eval(), or set its dropout to 0, for the validation",
        )
    limit = _limit(model, tolerance)
    with unchanged(model, loss_fn) as restore:
        out = step(inputs) if targets is None else step(inputs, targets)
        restore()  # what the step has written is not what it has read
        losses, grads = reference_grads(model, loss_fn, inputs, targets, batch_dim=batch_dim, params=params)
        coarse = torch.float32 if computes_in_single(model, loss_fn, inputs, targets, batch_dim) else None
        rough = reference_grads(model, loss_fn, inputs, targets, batch_dim=batch_dim, params=params, dtype=coarse)
        note = _second_opinion(model, loss_fn, inputs, targets, batch_dim, params, grads)
        restore()
        whole = loss_of_the_batch(model, loss_fn, inputs, targets)
    rows: list[ValidationRow] = []
    for check in checks:
        apart = groups is None or check.of_samples
        want, near = (
            _named(check.expected(own, each if apart else of_groups(each, groups, num_groups)))
            for own, each in ((losses, grads), rough)
        )
        rows += _compare(check, _named(getattr(out, check.field)), want, near, limit)
    return ValidationReport(rows, limit, note, [*notes, *_of_the_batch(losses, whole)])


def _limit(model: nn.Module, tolerance: Any) -> float:
    """The tolerance that is given, or that of the parameters' dtype."""
    own_dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    limit: Any = TOLERANCE.get(own_dtype, 1e-3) if tolerance is None else tolerance
    if not isinstance(limit, (int, float)) or not limit >= 0:
        raise BadArgument(
            f"tolerance={tolerance!r} is not a bound on errors", where="validate(tolerance=...)",
            why="errors are relative to the largest element", fix="a float, e.g. tolerance=1e-5",
        )  # fmt: skip
    return limit


def _draws(model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any, batch_dim: Any) -> bool:
    """Whether it draws random numbers; of a model that does not run the step says why, in better words."""
    try:
        return draws_random_numbers(model, loss_fn, inputs, targets, batch_dim)
    except Exception:
        return False


def _of_the_batch(losses: Tensor, whole: float | None) -> list[str]:
    """What the loss of the batch is, where it is not the mean of the losses `[B]` of its samples."""
    mean, total, close = losses.mean().item(), losses.sum().item(), SAME_LOSS * losses.abs().mean().item()
    if whole is None or not math.isfinite(whole) or not math.isfinite(mean) or abs(whole - mean) <= close:
        return []
    if abs(whole - total) <= close * len(losses):
        return [f"the loss of the batch is the sum of its samples' losses: its p.grad is {len(losses)} · mean_grad"]
    return [
        f"the loss of the batch, {whole:.4g}, is not the mean of its samples' losses, {mean:.4g}: its p.grad is not "
        "mean_grad (weights or ignored targets are counted over the batch there, and over the sample here)"
    ]


def _named(answer: Answer) -> Mapping[str, Tensor]:
    return {"(model)": answer} if isinstance(answer, Tensor) else answer


def _compare(
    check: Definition, got: Mapping[str, Tensor], want: Mapping[str, Tensor], near: Mapping[str, Tensor],
    tolerance: float,
) -> list[ValidationRow]:  # fmt: skip
    """One row per name in reference or answer; a name missing from either is a row too."""
    floor = _floor(want)
    rows = []
    for name in [*want, *(name for name in got if name not in want)]:
        if name not in got or name not in want or got[name].shape != want[name].shape:
            verdict = "missing" if name not in got else "not asked for" if name not in want else "wrong shape"
            rows.append(ValidationRow(name, math.inf, None, verdict, asked=check.field))
            continue
        error, sample = _error(got[name], want[name], floor, check.per_sample)
        noise, _ = _error(near[name], want[name], floor, check.per_sample)
        fine = error <= tolerance or (math.isfinite(noise) and error <= NOISE_FACTOR * noise)
        rows.append(ValidationRow(name, error, sample, "ok" if fine else "WRONG", noise, check.field))
    return rows


def _floor(want: Mapping[str, Tensor]) -> float:
    """What errors are at least relative to."""
    return FLOOR * max((w.abs().max().item() for w in want.values() if w.numel()), default=0.0)


def _error(got: Tensor, want: Tensor, floor: float, per_sample: bool) -> tuple[float, int | None]:
    """max|got - want| / max(max|want|, floor), and the sample where it lies; NaN or inf on one side only is inf."""
    if want.numel() == 0:
        return 0.0, None
    wanted = want.detach().to(torch.float64)
    answer = got.detach().to(device=wanted.device, dtype=torch.float64)
    difference = (answer - wanted).abs()
    difference = difference.masked_fill(wanted.isnan() & answer.isnan() | (answer == wanted), 0.0).nan_to_num(math.inf)
    largest = difference.max().item()
    sample = None
    if per_sample and largest > 0:
        sample = int(difference.reshape(wanted.shape[0], -1).amax(1).argmax().item())
    if largest == 0:
        return 0.0, sample
    scale = max(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item(), floor)
    return (largest / scale if scale > 0 else math.inf), sample


def _second_opinion(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any,
    batch_dim: Any,
    params: Sequence[str] | None,
    grads: ByName,
) -> str:
    """What `vmap(grad)` says of the loop's gradients, in words."""
    if has_rows(batch_dim):
        return "does not take samples that are rows; the loop is over the losses of the whole batch"
    try:
        _, found = vmap_reference(model, loss_fn, inputs, targets, batch_dim=batch_dim, params=params)
    except Exception as error:  # vmap refuses in many ways; none of them is the step's fault
        return f"cannot run this model ({type(error).__name__}: {first_line(error)[:120]})"
    floor = _floor(grads)
    errors = {name: _error(found[name], g, floor, True)[0] for name, g in grads.items()}
    name = max(errors, key=lambda key: errors[key], default="")
    return f"differs from the loop by at most {errors[name]:.1e} ({name})" if name else "nothing to compare"
