"""Samples whose gradient is not finite: they have no part in a clipped sum.

A factor of 0 would not keep them out, since 0·NaN is NaN. When the norms show such samples, the step runs once more
with the data of a finite sample in their places, counted 0 times. This costs one more step when it happens, no memory
for copies in the graph, and no compilation. It draws what the first run drew, so that norms, factors and sum are one; a
sample that is finite in its own place may then overflow in another's, whose dropout is another, and other data are put
there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import NotYetSupported
from psg_fx.program.arguments.call import Call
from psg_fx.quantities.clipped_sum import COUNTED
from psg_fx.step.compiled import StepOutput
from psg_fx.step.groups import Groups


class Runs(Protocol):
    """A step, compiled here or read from a file, that writes no buffers."""

    def __call__(self, call: Call, extras: Mapping[str, torch.Tensor]) -> StepOutput: ...


def with_finite_sum(
    step: Runs, call: Call, extras: Mapping[str, torch.Tensor], fields: dict[str, Any], groups: Groups | None = None
) -> dict[str, Any] | None:
    """The fields with a clipped sum over the finite samples (or groups of them) and factors 0 for the others; None if
    all are finite.

    step: runs the call once more, of what it found, and draws what it drew.
    """
    finite = _finite(fields["norms"])
    if finite is None:
        return None
    # Under CUDA graphs, what the first run returned lies where the second will write.
    fields = pytree.tree_map(torch.clone, fields)
    fields["clip_factors"] = pytree.tree_map(lambda factors: factors.where(finite, 0.0), fields["clip_factors"])
    counted = extras[COUNTED] * (finite if groups is None else groups.given(finite)).to(extras[COUNTED])
    fields["clipped_sum"] = _sum(step, call, {**extras, COUNTED: counted}, finite, groups, fields["clipped_sum"])
    return fields


def _finite(found: Any) -> torch.Tensor | None:
    """Which samples have finite norms; None if all do."""
    norms = list(found.values()) if isinstance(found, Mapping) else [found]
    if norms and _is_finite(functools.reduce(torch.add, norms)):  # norms that are not finite do not cancel
        return None
    finite = torch.stack([norm.isfinite() for norm in norms]).all(0)
    return None if finite.all() else finite


def _is_finite(norms: torch.Tensor) -> bool:
    """Whether all are, or their sum says so: few are added up sooner in Python than a kernel is launched."""
    return math.isfinite(sum(norms.tolist()) if norms.ndim == 1 and len(norms) <= _FEW else norms.sum())


_FEW = 256
"""Norms that are added up in Python."""


def _sum(
    step: Runs, call: Call, extras: Mapping[str, torch.Tensor], finite: torch.Tensor, groups: Groups | None, like: Any
) -> dict[str, torch.Tensor]:
    """Σ_b c_b g_b over the finite samples (or groups of them).

    Raises NotYetSupported where nothing that stands in the others' places makes their gradient finite.
    """
    samples = finite if groups is None else groups.of_samples(finite)
    rows = samples.nonzero().flatten()
    if not len(rows):
        return {name: torch.zeros_like(value) for name, value in like.items()}
    if call.axes:
        again = step(replace(call, tensors=tuple(_with_zeros(call, samples, rows))), extras)
        if all(value.isfinite().all() for value in again.clipped_sum.values()):
            return {name: value.clone() for name, value in again.clipped_sum.items()}
    else:
        for row in (rows[0], None, *rows[1:_TRIALS]):
            call = replace(call, tensors=tuple(_with_another(call, ~samples, row)))
            again = step(call, extras)
            found = _finite(again.norms)
            if found is None:
                return {name: value.clone() for name, value in again.clipped_sum.items()}
            samples = samples | (found if groups is None else groups.of_samples(found))  # data that count stay
    raise NotYetSupported(
        "the gradients of some samples are not finite, also where "
        + ("their rows are zeros" if call.axes else "other samples, or zeros, are in their places"),
        where='ClippedSum(nonfinite="drop")', why="their part of the sum cannot be left out by a factor of 0",
        fix='look for them in step(...).norms with ClippedSum(nonfinite="keep"), and leave them out of the batch',
    )  # fmt: skip


_TRIALS = 6
"""Finite samples, at most, that are put in the place of others, and overflow there by what is drawn for these."""


def _with_another(call: Call, places: torch.Tensor, row: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors of a call with the data of one sample in these places; without a row, zeros in what are numbers."""
    rows = torch.arange(len(places), device=places.device)
    if row is not None:
        rows = rows.where(~places, row)
    tensors = []
    for t, dim in zip(call.tensors, call.dims, strict=True):
        if dim is not None and row is not None:
            t = t.index_select(dim, rows)
        elif dim is not None and t.is_floating_point():
            t = t.masked_fill(places.reshape([-1 if d == dim else 1 for d in range(t.ndim)]), 0)
        tensors.append(t)
    return tensors


def _with_zeros(call: Call, finite: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a call whose samples are rows: those of the others are zeros, where they stay and point."""
    ids, rows = call.ids(call.tensors), torch.arange(len(finite), device=finite.device).where(finite, rows[0])
    tensors = []
    for t, dim, place in zip(call.tensors, call.dims, call.places, strict=True):
        if place is not None and t.is_floating_point() and (own := ids[place.axis]) is not None:
            shape = [-1 if d == place.dim else 1 for d in range(t.ndim)]
            t = t.masked_fill(~finite[own].reshape(shape), 0)
        elif dim is not None and t.is_floating_point():
            t = t.index_select(dim, rows)
        tensors.append(t)
    return tensors
