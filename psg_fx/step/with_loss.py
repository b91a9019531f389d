"""The step with a loss: losses and every quantity asked, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from psg_fx.errors import BadArgument
from psg_fx.graph.history import History
from psg_fx.passes.compile import compile_graph
from psg_fx.passes.pipeline import run_pipeline
from psg_fx.planner import rates
from psg_fx.planner.budget import Budget, in_bytes, memory_size
from psg_fx.program.call import Call
from psg_fx.program.program import Program
from psg_fx.program.state import Tracked, tracked_parameters
from psg_fx.progress import Progress
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.reference.definitions import definitions_for
from psg_fx.reference.validate import ValidationReport, validate
from psg_fx.step import mistakes
from psg_fx.step.compiled import CompiledStep, StepOutput, write_into
from psg_fx.step.finite import with_finite_sum
from psg_fx.step.module import PerSampleModule
from psg_fx.step.own_code import blamed
from psg_fx.step.parts import run_in_parts
from psg_fx.step.saving import export

_ABSENT: Any = object()


class LossModule(PerSampleModule):
    """A step with a loss: `step(inputs, targets)` returns the losses and every quantity asked."""

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What every call computes."""
        return self.settings.quantities

    def forward(
        self, inputs: Any = _ABSENT, targets: Any = _ABSENT, *more: Any, out: StepOutput | None = None, **given: Any
    ) -> StepOutput:
        """Run the step.

        inputs: a tensor, a tuple or list (positional) or a dict (keyword).  targets: the same, or absent.
        weights: [B], for WeightedSum and a weighted ClippedSum.  directions: a mapping by parameter name, for Dots.
        out: a former output: the results are written into its tensors (for another batch size, into its memory), and
        it is returned.
        """
        if inputs is _ABSENT:
            raise mistakes.no_inputs(given)
        if more:
            raise mistakes.too_many(2 + len(more))
        if out is not None and not self._memory.keep:
            raise BadArgument(
                "out= needs a step that reuses its outputs", where="step(inputs, targets, out=...)",
                why="the results would be written to fresh memory first", fix="transform(..., reuse_outputs=True)",
            )  # fmt: skip
        call = self._take_apart(inputs, targets)
        tracked = self._tracked()
        quantities = tuple(q.resolved(tracked.shapes, given) for q in self.settings.quantities)
        variant = tuple(q.variant for q in quantities)
        step: CompiledStep = self._look_up(call, lambda: self._build(tracked, call, quantities), variant)
        if step.part is not None and call.batch_size() > step.part:
            return self._said(self._in_parts(step, call, given, out))
        extras = self._extras(call, given, tracked, step.binding.given)
        with blamed(self.model, self.loss_fn, call):
            found = step(call, extras, out)
        if any(isinstance(q, ClippedSum) and q.nonfinite == "drop" for q in quantities):
            finite = with_finite_sum(step, call, extras, vars(found))
            if finite is not None:
                return self._said(_into(found, finite) if out is not None else StepOutput(finite))
        return self._said(found)

    def _said(self, out: StepOutput) -> StepOutput:
        """The output, which says how it is put together with those of other processes."""
        out.joins = self.settings.joins_of_processes
        return out

    def _in_parts(self, step: CompiledStep, call: Call, given: Mapping[str, Any], out: StepOutput | None) -> StepOutput:
        """The step for a batch that does not fit into the memory budget."""
        if names := step.statistics:
            raise BadArgument(
                f"the buffer {names[0]} keeps a statistic of the whole batch, which would run in parts",
                where="memory_budget",
                why=f"{call.batch_size()} samples do not fit into the budget at once, and parts have other statistics",
                fix="give more memory, or run smaller batches by psg_fx.microbatch",
            )  # fmt: skip
        found = self.in_parts(call, given, step.part or 1)
        return found if out is None else _into(out, vars(found))

    def in_parts(
        self, call: Call, given: Mapping[str, Any], size: int, report: Callable[[int, int], Any] = lambda done, of: None
    ) -> StepOutput:
        """The output for a call, from parts of at most `size` samples.  report: is told of parts done, and of all."""
        return run_in_parts(self, self.settings, call, given, size, report)

    def validate(
        self, inputs: Any, targets: Any = _ABSENT, *, tolerance: float | None = None, **given: Any
    ) -> ValidationReport:
        """Compare the per-sample gradients with a float64 loop over single samples, and with `vmap(grad)`.

        Returns a report that prints as a table (parameter, max error, worst sample, verdict); `report.ok` says whether
        all is well.
        """
        checks, notes = definitions_for(self.settings.quantities, given)
        names = tracked_parameters(self.model, self.settings.params).names
        targets = None if targets is _ABSENT else targets
        return validate(
            lambda *batch: self(*batch, **given), self.model, self.loss_fn, inputs, targets,
            batch_dim=self.settings.batch_dim, params=names, checks=checks, tolerance=tolerance, notes=notes,
        )  # fmt: skip

    def _take_apart(self, inputs: Any, targets: Any = _ABSENT) -> Call:
        given = ((), {}) if targets is _ABSENT else as_arguments(targets)
        return self._apart(as_arguments(inputs), given)

    def export(self, path: str | PathLike[str], inputs: Any, targets: Any = _ABSENT, **given: Any) -> Path:
        """Write the step as one file (an AOTInductor package, `.pt2`) for batches of any size, in a minute or so.

        The file holds the compiled step, its lowered graph and, as JSON, what goes in and comes out; parameters and
        buffers are inputs by name.  `psg_fx.load` makes a function of it; `torch._inductor.aoti_load_package` and C++
        need no psg_fx (docs/export.md).  It is tried on this batch before it is put in place.

        path: ends in .pt2.  inputs, targets, given: one call of the step.  Returns the path.

        Raises:
            BadArgument: as the step does.
            NotYetSupported: what the step does cannot be in a file: random draws, custom operators, attributes that
                are written, a graph for one batch size.
        """
        call, tracked = self._take_apart(inputs, targets), self._tracked()
        quantities = tuple(q.resolved(tracked.shapes, given) for q in self.settings.quantities)
        return export(
            path, self.model, self.loss_fn, lambda: self._build(tracked, call, quantities, own_ops=False), call,
            quantities, lambda dtypes: self._extras(call, given, tracked, dtypes),
        )  # fmt: skip

    def _build(
        self, tracked: Tracked, call: Call, quantities: Sequence[Quantity], own_ops: bool = True
    ) -> tuple[CompiledStep, Program]:
        program = Program(self.model, self.loss_fn, call)
        device, budget = rates.device(self._device(call).type, self.settings.replays), None
        if not own_ops:
            device = replace(device, own_ops=False)
        if self.settings.reuse_outputs:
            device = replace(device, kept=0.0)  # the memory is held anyway
        if self.settings.memory_budget is not None:
            limit = in_bytes(self.settings.memory_budget, memory_size(self._device(call)))
            budget = Budget(limit, parts=all(q.joins() for q in quantities))
        dtype = self._extras_dtype()
        history = History(progress=Progress(self.settings.progress))
        gm = run_pipeline(program, call, tracked.aliases, quantities, dtype, device, history, budget=budget)
        s = self.settings
        run = compile_graph(gm, s.backend, s.mode, s.options, s.dynamic, device.name, self._memory, history)
        return CompiledStep(gm, history, self.model, self.loss_fn, run, self._memory), program

    def _extras_dtype(self) -> torch.dtype:
        """Bounds and weights are given in float64 to a float64 model, else in float32."""
        is_double = any(p.dtype is torch.float64 for p in self.model.parameters())
        return torch.float64 if is_double else torch.float32

    def _extras(
        self, call: Call, given: Mapping[str, Any], tracked: Tracked, dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for quantity in self.settings.quantities:
            for name, value in quantity.values(tracked.shapes, given).items():
                found[name] = _as_tensor(value, dtypes[name], self._device(call))
        for name in set(dtypes) - set(found):  # how often each sample counts
            found[name] = torch.ones(call.batch_size(), dtype=dtypes[name], device=self._device(call))
        unknown = set(given) - {name for quantity in self.settings.quantities for name in quantity.reads}
        if unknown:
            raise BadArgument(
                f"step() got {', '.join(sorted(unknown))}", where="step(inputs, targets, ...)",
                why="no quantity of this step reads it",
                fix="WeightedSum() reads weights=, Dots() reads directions=; what the model reads goes into a dict of "
                "inputs: step({name: value, ...}, targets)",
            )  # fmt: skip
        if "weights" in found and tuple(found["weights"].shape) != (call.batch_size(),):
            raise BadArgument(
                f"weights have shape {tuple(found['weights'].shape)}", where="step(inputs, targets, weights=...)",
                why=f"there is one weight for each of the {call.batch_size()} samples", fix="pass a [B] tensor",
            )  # fmt: skip
        return found


def _into(out: StepOutput, fields: Mapping[str, Any]) -> StepOutput:
    """The output with the values of these fields."""
    write_into(vars(out), fields)
    return out


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple or a dict as (args, kwargs)."""
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    if isinstance(value, Mapping):
        return (), dict(value)
    return (value,), {}


def _as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers are sent without waiting for the device; a tensor may change as soon as the step has returned."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype).contiguous()
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return torch.stack([_as_tensor(v, dtype, device) for v in value])
    return torch.as_tensor(value, dtype=dtype, device="cpu").to(device, non_blocking=True).contiguous()
