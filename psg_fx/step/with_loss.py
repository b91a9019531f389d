"""The step with a loss: losses and every quantity asked, in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psg_fx.algebra.members import Grouping
from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.garbage import first_without_collection
from psg_fx.graph import facts
from psg_fx.graph.history import History
from psg_fx.graph.slices import Slices
from psg_fx.passes.pipeline import Asked, run_pipeline
from psg_fx.planner.budget import Budget, in_bytes, memory_size
from psg_fx.planner.plan import PLAN
from psg_fx.program.ambient import not_taken_apart
from psg_fx.program.arguments.call import Call
from psg_fx.program.changes.effects import nothing_left
from psg_fx.program.program import Program
from psg_fx.program.state import Tracked, tracked_parameters
from psg_fx.progress import Progress
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import weights_of_clipped
from psg_fx.quantities.own import is_own, of_call
from psg_fx.reference.definitions import definitions_for
from psg_fx.reference.validate import ValidationReport, validate
from psg_fx.step import mistakes
from psg_fx.step.arguments import ABSENT, as_arguments
from psg_fx.step.binding import Binding
from psg_fx.step.compiled import CompiledStep, StepOutput, check_out, out_of_the_way, write_into
from psg_fx.step.constants import Constants
from psg_fx.step.extras import further_inputs
from psg_fx.step.finite import with_finite_sum
from psg_fx.step.first_answer import of_one_sample
from psg_fx.step.groups import Groups, factors_of_nothing, groups_of, no_groups
from psg_fx.step.module import PerSampleModule
from psg_fx.step.own_code import blamed
from psg_fx.step.parts import run_in_parts
from psg_fx.step.rows import rows_of
from psg_fx.step.saving import export
from psg_fx.step.settings import Settings


class LossModule(PerSampleModule):
    """A step with a loss: `step(inputs, targets)` returns the losses and every quantity asked."""

    _constants: Constants
    _blocks: Groups | None
    _drops: bool
    _has_own: bool

    def __init__(self, model: nn.Module, loss_fn: Any, settings: Settings) -> None:
        super().__init__(model, loss_fn, settings)
        self._constants = Constants()
        self._blocks = None
        self._drops = bool(weights_of_clipped(settings.quantities))
        self._has_own = any(map(is_own, settings.quantities))

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What every call computes."""
        return self.settings.quantities

    @not_taken_apart
    @first_without_collection
    def forward(
        self, inputs: Any = ABSENT, targets: Any = ABSENT, *more: Any, out: StepOutput | None = None,
        groups: Any = None, num_groups: int | None = None, num_samples: int | None = None, **given: Any,
    ) -> StepOutput:  # fmt: skip
        """Run the step.

        inputs: a tensor, a tuple or list (positional) or a dict (keyword); in them more of these, and objects.
        targets: the same, or absent.  weights: [B], for WeightedSum and a weighted ClippedSum.  directions: a mapping
        by parameter name, for Dots.
        groups: [B] ints from 0 to num_groups - 1, the group (a user, a document) of each sample, -1 for none.  Then
        every quantity is of groups, whose gradient is the sum of those of their samples, and has a row for each group
        where it had one for each sample, as have weights; losses and the mean gradient are those of samples.
        num_groups: by default groups.max() + 1, which waits for the device of `groups`.  With groups on a CUDA device
        and num_groups given, nothing waits (but a ClippedSum that drops what is not finite), and a number out of range
        makes NaN of what is asked.
        num_samples: B, where inputs are `psg_fx.Rows` and none has a dim with a place for each sample.
        out: a former output, with reuse_outputs=True: the results are written into its tensors (for another batch
        size, into its memory), and it is returned.
        """
        mistakes.check_outside()
        if inputs is ABSENT:
            raise mistakes.no_inputs(given)
        if more:
            raise mistakes.too_many(2 + len(more))
        mistakes.check_keywords(given, self.settings.quantities)
        if out is not None:
            check_out(out, self._memory.keep)
        call = self._take_apart(inputs, targets, num_samples)
        if call.axes:
            mistakes.check_rows(self.settings.memory_budget, self._slices() is not None)
        tracked = self._tracked()
        mistakes.check_graphs(call, self.model, tracked)
        quantities = [of_call(q, "resolved", tracked.shapes, given) for q in self.settings.quantities]
        members = None if groups is None and num_groups is None else self._groups(call, groups, num_groups)
        grouping = None if members is None else members.grouping
        rows = rows_of(call, members)
        variant = (*[q.variant for q in quantities], self._variant(grouping), *[s is None for s in rows.largest])
        build = functools.partial(self._build, tracked, call, quantities, grouping, rows=rows.largest)
        step: CompiledStep = self._look_up(call, tracked, build, variant)
        while step.part is not None and members is None and call.batch_size() > step.part:
            if step.is_cut:
                return self._said(self._within_budget(step, call, given, out))
            step.larger = step.larger or call.batch_size()
            step = self._look_up(call, tracked, build, (*variant, step.larger))
        extras = self._extras(call, given, tracked, step.binding, members)
        if call.axes:
            extras |= rows.inputs(step.binding.given)
        if out is not None:
            call, extras = out_of_the_way(out, call, extras)
        drops = self._drops and not step.leaves_out
        before = step.before(call) if drops else None
        with blamed(self.model, self.loss_fn, call):
            found = step(call, extras, out, groups=members)
        if members is not None and not call.batch_size():
            vars(found).update(factors_of_nothing(self.settings.quantities, found, extras))
        if drops:
            again = functools.partial(step, groups=members, before=before)
            finite = with_finite_sum(again, call, extras, vars(found), members)
            if finite is not None:
                return self._said(_into(found, finite) if out is not None else StepOutput(finite), members)
        return self._said(found, members)

    def _said(self, out: StepOutput, groups: Groups | None = None) -> StepOutput:
        """The output, which says how it is put together with those of other processes."""
        out.joins = self.settings.joins_of_processes if groups is None else self.settings.joins_of_groups
        return out

    def _groups(self, call: Call, groups: Any, num_groups: Any) -> Groups | None:
        """The groups of the call, None where every sample stands for itself."""
        if groups is not None:
            former = self._blocks
            found = groups_of(groups, num_groups, call.batch_size(), former, self._has_own)
            if self._has_own and not found.count:
                raise no_groups()
            if found is not former and found.grouping.layout == "blocks":
                self._blocks = found
            return found
        if num_groups is not None:
            raise BadArgument(
                "num_groups is given without groups", where="step(inputs, targets, num_groups=...)",
                why="it counts the groups of the samples", fix="pass groups=ids, too, or leave it out",
            )  # fmt: skip
        return None

    def _variant(self, grouping: Grouping | None) -> Hashable:
        """What a graph for groups depends on; inside a memory budget on how many these are."""
        if grouping is None:
            return None
        return grouping.layout if self.settings.memory_budget is None else grouping

    def _within_budget(
        self, step: CompiledStep, call: Call, given: Mapping[str, Any], out: StepOutput | None
    ) -> StepOutput:
        """The step for a batch that does not fit into the memory budget."""
        if names := step.statistics:
            raise BadArgument(
                f"{names[0]} keeps a statistic of the whole batch, which would run in parts",
                where="memory_budget",
                why=f"{call.batch_size()} samples do not fit into the budget at once, and parts have other statistics",
                fix="give more memory, or run smaller batches by psg_fx.microbatch",
            )  # fmt: skip
        return self.in_parts(call, given, step.part or 1, out, run=self.forward)  # hooks see the whole batch

    def in_parts(
        self, call: Call, given: Mapping[str, Any], size: int, out: StepOutput | None = None,
        report: Callable[[int, int], Any] = lambda done, of: None, run: Callable[..., StepOutput] | None = None,
    ) -> StepOutput:  # fmt: skip
        """The output for a call, from parts of at most `size` samples.  report: is told of parts done, and of all.
        run: what answers a part, by default a call of the step.
        """
        if out is not None:
            check_out(out, self._memory.keep)
        found = run_in_parts(run or self, self.settings, call, given, size, report)
        return found if out is None else _into(out, vars(found))

    def validate(
        self, inputs: Any, targets: Any = ABSENT, *, tolerance: float | None = None, **given: Any
    ) -> ValidationReport:
        """Compare the per-sample gradients with a float64 loop over single samples, and with `vmap(grad)`; or where
        samples are rows, with the gradient of each of the losses of the whole batch.

        Returns a report that prints as a table (parameter, max error, worst sample, verdict); `report.ok` says whether
        all is well.
        """
        if "out" in given:
            raise BadArgument(
                "validate() got out", where="step.validate(inputs, targets, out=...)",
                why="it compares results, and keeps none", fix="leave it out",
            )  # fmt: skip
        calls = ("num_samples", "groups", "num_groups")
        mistakes.check_keywords(
            {k: v for k, v in given.items() if k not in calls}, self.settings.quantities,
            "step.validate(inputs, targets)", ("inputs", "targets", "tolerance", *calls),
        )  # fmt: skip
        if self._take_apart(inputs, targets, given.get("num_samples")).batch_size() == 0:
            raise BadArgument(
                "there are no samples", where="step.validate(inputs, targets)",
                why="answers are compared with those of single samples", fix="pass a batch that is not empty",
            )  # fmt: skip
        shapes = self._tracked().shapes
        for quantity in self.settings.quantities:
            of_call(
                of_call(quantity, "resolved", shapes, given), "values", shapes, given
            )  # which names what is missing
        lists = {name for name, value in given.items() if isinstance(value, (list, tuple)) and name != "groups"}
        exact = given | {name: torch.as_tensor(given[name]) for name in lists}
        checks, notes = definitions_for(self.settings.quantities, exact)
        names = tracked_parameters(self.model, self.settings.params).names
        targets = None if targets is ABSENT else (None,) if targets is None else targets
        with nothing_left((self.model, self.loss_fn)), torch.inference_mode(False), torch.enable_grad():
            return validate(
                lambda *batch: self(*batch, **given), self.model, self.loss_fn, inputs, targets,
                batch_dim=self.settings.batch_dim, params=names, checks=checks, tolerance=tolerance, notes=notes,
                groups=given.get("groups"), num_groups=given.get("num_groups"),
            )  # fmt: skip

    def _take_apart(self, inputs: Any, targets: Any = ABSENT, num_samples: int | None = None) -> Call:
        return self._apart(as_arguments(inputs), as_arguments(targets), num_samples)

    def export(self, path: str | PathLike[str], inputs: Any, targets: Any = ABSENT, **given: Any) -> Path:
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
        if "groups" in given or "num_groups" in given:
            raise NotYetSupported(
                "a step of groups is not exported", where="step.export(path, inputs, targets, groups=...)",
                why="how its rows are laid out is chosen at each call, and a file has one graph",
                fix="export the step of single samples, and sum its grads by groups",
            )  # fmt: skip
        rows = given.pop("num_samples", None)
        known = "path", "inputs", "targets", "num_samples"
        mistakes.check_keywords(given, self.settings.quantities, "step.export(path, inputs, targets)", known)
        call, tracked = self._take_apart(inputs, targets, rows), self._tracked()
        quantities = tuple(of_call(q, "resolved", tracked.shapes, given) for q in self.settings.quantities)
        return export(
            path, self.model, self.loss_fn, lambda: self._build(tracked, call, quantities, own_ops=False), call,
            [(q, of_call(q, "values", tracked.shapes, given)) for q in quantities],
            lambda binding: self._extras(call, given, tracked, binding),
        )  # fmt: skip

    def _build(
        self, tracked: Tracked, call: Call, quantities: Sequence[Quantity], grouping: Grouping | None = None,
        own_ops: bool = True, rows: Sequence[int | None] = (),
    ) -> tuple[CompiledStep, Program]:  # fmt: skip
        program = Program(self.model, self.loss_fn, call)
        device, budget = self.settings.rates_of(self._device(call)), None
        if not own_ops:
            device = replace(device, own_ops=False)
        if self.settings.reuse_outputs:
            device = replace(device, kept=0.0)  # the memory is held anyway
        if self.settings.memory_budget is not None:
            limit = in_bytes(self.settings.memory_budget, memory_size(self._device(call)))
            budget = Budget(limit, parts=grouping is None and all(q.joins() for q in quantities))
        history = History(progress=Progress(self.settings.progress))
        asked = Asked(
            tuple(quantities), self._extras_dtype(), device, call.batch_size(), budget=budget, grouping=grouping,
            rows=tuple(zip(call.row_sizes, rows or [None] * len(call.axes), strict=True)),
        )  # fmt: skip
        gm = run_pipeline(
            program, call, tracked.aliases, asked, history, self._slices(), own_ops and self.settings.is_compiled
        )
        run = self._compiled(gm, device.name, history, facts.graph_facts(gm).rounds)
        step = CompiledStep(gm, history, self.model, self.loss_fn, run, self._memory)
        step.binding.check_arms(gm, call)
        if self.settings.params is None and (plan := PLAN.found(gm)) is not None:  # on disk is none without gradients
            mistakes.require_a_gradient(plan)
        if own_ops and self.settings.compares_first:
            names = () if grouping is not None else tracked.names
            step.expected = of_one_sample(self.model, self.loss_fn, call, gm, step.binding, names, quantities)
        return step, program

    def _slices(self) -> Slices | None:
        """What of the model is sliced over processes that compute it together."""
        return None

    def _extras_dtype(self) -> torch.dtype:
        """Bounds and weights are given in float64 to a float64 model, else in float32."""
        is_double = any(p.dtype is torch.float64 for p in self.model.parameters())
        return torch.float64 if is_double else torch.float32

    def _extras(
        self, call: Call, given: Mapping[str, Any], tracked: Tracked, binding: Binding, groups: Groups | None = None
    ) -> dict[str, torch.Tensor]:
        return further_inputs(
            self.settings.quantities, tracked.shapes, given, binding, self._constants, self._device(call),
            call.batch_size(), groups,
        )  # fmt: skip


def _into(out: StepOutput, fields: Mapping[str, Any]) -> StepOutput:
    """The output with the values of these fields."""
    write_into(vars(out), fields)
    return out
