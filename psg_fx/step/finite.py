"""Samples whose gradient is not finite: they have no part in a clipped sum.

A factor of 0 would not keep them out, since 0·NaN is NaN. When the norms show such samples, the step runs once more
with the data of a finite sample in their places, counted 0 times. This costs one more step when it happens, no memory
for copies in the graph, and no compilation.
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
    """
    norms = fields["norms"]
    norms = list(norms.values()) if isinstance(norms, Mapping) else [norms]
    if norms and _is_finite(functools.reduce(torch.add, norms)):  # norms that are not finite do not cancel
        return None
    finite = torch.stack([norm.isfinite() for norm in norms]).all(0)
    if finite.all():
        return None
    # Under CUDA graphs, what the first run returned lies where the second will write.
    fields = pytree.tree_map(torch.clone, fields)
    fields["clip_factors"] = pytree.tree_map(lambda factors: factors.where(finite, 0.0), fields["clip_factors"])
    counted = extras[COUNTED] * (finite if groups is None else groups.given(finite)).to(extras[COUNTED])
    samples = finite if groups is None else groups.of_samples(finite)
    fields["clipped_sum"] = _sum(step, call, {**extras, COUNTED: counted}, samples, fields["clipped_sum"])
    return fields


def _is_finite(norms: torch.Tensor) -> bool:
    """Whether all are, or their sum says so: few are added up sooner in Python than a kernel is launched."""
    return math.isfinite(sum(norms.tolist()) if norms.ndim == 1 and len(norms) <= _FEW else norms.sum())


_FEW = 256
"""Norms that are added up in Python."""


def _sum(
    step: Runs, call: Call, extras: Mapping[str, torch.Tensor], finite: torch.Tensor, like: Any
) -> dict[str, torch.Tensor]:
    """Σ_b c_b g_b over the finite samples.

    Raises NotYetSupported where samples are rows, and zeros in the others' rows do not make their gradient finite.
    """
    rows = finite.nonzero().flatten()
    if not len(rows):
        return {name: torch.zeros_like(value) for name, value in like.items()}
    rows = torch.arange(len(finite), device=finite.device).where(finite, rows[0])
    pairs = zip(call.tensors, call.dims, strict=True)
    tensors = [t if d is None else t.index_select(d, rows) for t, d in pairs] if not call.axes else (
        _with_zeros(call, finite, rows)
    )  # fmt: skip
    again = step(replace(call, tensors=tuple(tensors)), extras)
    if call.axes and not all(value.isfinite().all() for value in again.clipped_sum.values()):
        raise NotYetSupported(
            "the gradients of some samples are not finite, also where their rows are zeros",
            where='ClippedSum(nonfinite="drop")', why="their part of the sum cannot be left out by a factor of 0",
            fix='look for them in step(...).norms with ClippedSum(nonfinite="keep"), and leave them out of the batch',
        )  # fmt: skip
    return {name: value.clone() for name, value in again.clipped_sum.items()}


def _with_zeros(call: Call, finite: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a call whose samples are rows: those of the others are zeros, where they stay and point."""
    ids = call.ids(call.tensors)
    tensors = []
    for t, dim, place in zip(call.tensors, call.dims, call.places, strict=True):
        if place is not None and t.is_floating_point() and (own := ids[place.axis]) is not None:
            shape = [-1 if d == place.dim else 1 for d in range(t.ndim)]
            t = t.masked_fill(~finite[own].reshape(shape), 0)
        elif dim is not None and t.is_floating_point():
            t = t.index_select(dim, rows)
        tensors.append(t)
    return tensors
