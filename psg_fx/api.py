"""`psg_fx.transform`: the public interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule

from psg_fx import copies, cost, facts, mistakes
from psg_fx.arguments import BatchDim, Call, take_apart
from psg_fx.budget import Budget, in_bytes, memory_size
from psg_fx.clipping import ClippedSum
from psg_fx.errors import BadArgument
from psg_fx.nonfinite import with_finite_sum
from psg_fx.outputs import Memory, write_into
from psg_fx.passes.capture import Program
from psg_fx.passes.compile import compile_graph
from psg_fx.passes.pipeline import run_pipeline
from psg_fx.passes.runner import History
from psg_fx.program.ambient import ambient_key, isolated
from psg_fx.program.captured import Cache, Captured
from psg_fx.program.guard import Guard, Lying, Structure, refuse_iterators
from psg_fx.progress import Progress
from psg_fx.quantity import Grads, Quantity
from psg_fx.settings import Settings, as_sequence, needs_loss, without_loss
from psg_fx.state import ParamFilter, Tracked, call_key, refuse_hooks, tracked_parameters
from psg_fx.step import CompiledStep, StepOutput

if TYPE_CHECKING:
    from psg_fx.validation import ValidationReport

_ABSENT: Any = object()
_STATE = ("_parameters", "_buffers", "_modules")


def transform(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    quantities: Quantity | Sequence[Quantity] | None = None,
    params: ParamFilter = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    reuse_outputs: bool = False,
    memory_budget: float | None = None,
    progress: bool = True,
    accumulate: bool = False,
) -> PerSampleModule:
    """Compile a model and its loss into one graph that computes per-sample quantities.

    Args:
        model: any `nn.Module`; its state is read at every call.
        loss_fn: `loss_fn(output, *targets)`, a scalar (any reduction) or `[B]`.  The loss of sample i is by definition
            `loss_fn(model(x[i:i+1]), y[i:i+1])`.  None: the step is the model, and `backward()` leaves
            `grad_sample` `[B, *shape]` on every parameter.
        quantities: one quantity or several; each fills a field of the step's output.  Default `Grads()`.
        params: which parameters: None for all that require gradients, globs on names, or a predicate (name, parameter).
        batch_dim: where the samples lie: an int, or `(inputs_dims, targets_dims)` of ints and None (shared by all).
        loss_reduction: without `loss_fn` only, where psg_fx does not see the loss: "sum" (the default), or "mean" if
            the loss is a mean over the batch.  Under a mean loss the default leaves gᵢ / B, each sample's part of the
            ordinary gradient, where Opacus and "mean" leave gᵢ, the gradient of its own loss.
        backend, mode, options: as in `torch.compile`; "eager" runs the lowered graph as it is.
        dynamic: None: the first batch size is compiled statically, the next one dynamically; True: dynamically from the
            start; False: a graph for every size.  None and True: a batch of one sample is compiled once for itself.
        reuse_outputs: on CPU with inductor, keep the memory of large results and intermediate values for later calls,
            which saves the page faults of fresh memory.  Memory is used again once nobody holds a tensor in it, or
            given back explicitly: `step(x, y, out=out)` writes into the tensors of a former output.  Plans then save
            time rather than memory.  With CUDA graphs
            (mode="reduce-overhead") the tensors of an output are valid until the next call.
        memory_budget: with a loss: what a step may allocate beside parameters and inputs, in bytes (int) or as a
            fraction of the device's memory (float).  The planner trades time for memory: cheaper trees, then parts of
            the batch one after the other, whose outputs are put together as by `microbatch`.
        progress: while a step is captured and compiled, a line on stderr says so, if that is a terminal.
        accumulate: without `loss_fn` only: a further `backward()` makes `grad_sample` a list of those of each call, as
            Opacus does.  Otherwise it is refused while a `grad_sample` of the parameters as they are is there.

    Returns:
        A module: `step(inputs, targets)` with a loss, `step(*args, **kwargs)` without.

    Raises:
        BadArgument: an argument that does not mean anything.
        SamplesMixed: at the first call: a sample's loss depends on other samples.
        NotYetSupported: at the first call: the gradients exist, but cannot be computed exactly.
        CaptureFailed: at the first call: model and loss do not become one graph.
    """
    mistakes.check_model(model)
    settings = Settings(
        (Grads(),) if quantities is None else as_sequence(quantities), params, batch_dim, loss_reduction or "sum",
        backend, mode, options, dynamic, reuse_outputs, memory_budget, progress, accumulate,
    )  # fmt: skip
    if loss_fn is not None:
        mistakes.check_loss(loss_fn)
        if loss_reduction is not None:
            raise without_loss("loss_reduction", "a loss that is given is taken apart into those of its samples, "
                               "whatever its reduction")  # fmt: skip
        if accumulate:
            raise without_loss("accumulate", "with a loss nothing is left on the parameters")
        return LossModule(model, loss_fn, settings)
    if quantities is not None:
        raise needs_loss(
            "quantities", "without loss_fn the step leaves grad_sample on the parameters, and nothing else"
        )
    if memory_budget is not None:
        raise needs_loss("memory_budget", "without loss_fn the gradients of the whole batch are materialised")
    from psg_fx.drop_in import DropInModule

    return DropInModule(model, None, settings)


class PerSampleModule(nn.Module):
    """What `transform` returns.  Its parameters, buffers and state_dict are the model's own."""

    # Set past nn.Module, so that neither becomes a submodule and renames the parameters.
    model: nn.Module
    loss_fn: Any

    def __init__(self, model: nn.Module, loss_fn: Any, settings: Settings) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)
        for group in _STATE:
            object.__setattr__(self, group, getattr(model, group))
        object.__setattr__(self, "loss_fn", loss_fn)
        self.training = model.training
        nn.Module.register_load_state_dict_post_hook(self, _after_loading)
        self.settings = settings
        self._memory = Memory(keep=settings.reuse_outputs)
        self._cache = Cache()
        self._structure: tuple[Structure, Tracked] | None = None
        self._last: Any = None

    def train(self, mode: bool = True) -> PerSampleModule:
        """Set the model's training mode."""
        self.training = mode
        self.model.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return copies.carried(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies.restore(self, state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state_dict."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The model's own way to load, also where a module around this one is loaded (Opacus wraps it)."""
        self.model._load_from_state_dict(*args, **kwargs)

    @property
    def graphs(self) -> dict[str, GraphModule]:
        """The graph after each pass of the last capture, by stage name."""
        return dict(self._history("graphs").graphs)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds spent in each pass of the last capture, and in all that torch has compiled of it ("compile")."""
        found: dict[str, float] = {}
        for step in self._history("timings").steps:
            found[step.name] = found.get(step.name, 0.0) + step.seconds
        return found

    def print_graph(self, stage: str = "tidied") -> str:
        """Print (and return) a stage's graph as readable Python."""
        graphs = self.graphs
        if stage not in graphs:
            raise BadArgument(
                f"there is no stage {stage!r}", where="print_graph(stage)", why=f"stages are {', '.join(graphs)}",
                fix="use one of those",
            )  # fmt: skip
        from psg_fx.report import readable

        text = readable(graphs[stage])
        print(text)
        return text

    def explain(self, measure: bool = False) -> str:
        """A table of every site: where the samples lie, what is computed, how, at what cost, and why not otherwise.

        measure: compile and time every part of the plan by itself, beside the predictions; some seconds for each.
        """
        from psg_fx.report import explain

        return explain(self.graphs, measure)

    def report(self, path: str | PathLike[str], *, measure: bool = False) -> Path:
        """Write one HTML file that opens in any browser and needs nothing else: the graph after every pass with what
        is known of each node, the plan, time per site and memory over the step.

        path: of the file.  measure: as in `explain`.  Returns the path.
        """
        from psg_fx.html import write_report

        return write_report(path, self.model, self.loss_fn, self._history("report"), measure)

    def _history(self, what: str) -> History:
        if self._last is None:
            raise BadArgument(
                "nothing has been captured yet", where=f"step.{what}", why="a step is captured at its first call",
                fix="call the step once on a batch",
            )  # fmt: skip
        history: History = self._last.history
        return history

    def _device(self, call: Call) -> torch.device:
        return call.tensors[0].device if call.tensors else torch.device("cpu")

    def _tracked(self) -> Tracked:
        """The parameters that are asked, as the model is now."""
        if self._structure is None or not self._structure[0].holds():
            roots = [m for m in (self.model, self.loss_fn) if isinstance(m, nn.Module)]
            self._structure = Structure(roots), tracked_parameters(self.model, self.settings.params)
        structure, tracked = self._structure
        if callable(self.settings.params):
            tracked = tracked_parameters(self.model, self.settings.params)
            self._structure = structure, tracked
        if structure.has_hooks():
            refuse_hooks(self.model, tracked)
        return tracked

    def _look_up(self, call: Call, build: Callable[[], tuple[Any, Program]], variant: Hashable = None) -> Any:
        """The compiled step for the model and the code around it as they are now, made if it is new."""
        assert self._structure is not None
        structure, tracked = self._structure
        ambient = ambient_key(self._device(call).type)
        key = (variant, structure.meaning, tracked.key, call_key(call), ambient)
        found = self._cache.find(key, call.batch_size())
        if found is None:
            with isolated():
                found = self._cache.find(key, call.batch_size()) or self._capture(key, call, build, structure)
        self._last = found.step
        return found.step

    def _capture(
        self, key: Hashable, call: Call, build: Callable[[], tuple[Any, Program]], structure: Structure
    ) -> Captured:
        self._cache.tell(key)
        step, program = mistakes.built(build, self.model, self.loss_fn, call)
        guard = Guard(program.observed, [("the loss", self.loss_fn)], structure)
        refuse_iterators(guard.walk)
        step.binding.follow(Lying(guard.walk))
        known = facts.graph_facts(step.gm)
        if known.data["one_size"] and not self._cache.knows(key):
            warnings.warn(known.notes[0], stacklevel=6)
        size = call.batch_size() if self.settings.dynamic is False or known.data["one_size"] else None
        return self._cache.add(key, Captured(step, guard, size))


def _after_loading(step: PerSampleModule, found: Any) -> None:
    """The model's hooks, where a module around the step is loaded."""
    for hook in step.model._load_state_dict_post_hooks.values():
        hook(step.model, found)


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
            return self._in_parts(step, call, given, out)
        extras = self._extras(call, given, tracked, step.binding.given)
        with mistakes.blamed(self.model, self.loss_fn, call):
            found = step(call, extras, out)
        if any(isinstance(q, ClippedSum) and q.nonfinite == "drop" for q in quantities):
            finite = with_finite_sum(step, call, extras, vars(found))
            if finite is not None:
                return _into(found, finite) if out is not None else StepOutput(finite)
        return found

    def _in_parts(self, step: CompiledStep, call: Call, given: Mapping[str, Any], out: StepOutput | None) -> StepOutput:
        """The step for a batch that does not fit into the memory budget."""
        from psg_fx.microbatch import run_in_parts

        if names := step.statistics:
            raise BadArgument(
                f"the buffer {names[0]} keeps a statistic of the whole batch, which would run in parts",
                where="memory_budget",
                why=f"{call.batch_size()} samples do not fit into the budget at once, and parts have other statistics",
                fix="give more memory, or run smaller batches by psg_fx.microbatch",
            )  # fmt: skip
        found = run_in_parts(self, call, given, step.part or 1)
        return found if out is None else _into(out, vars(found))

    def validate(
        self, inputs: Any, targets: Any = _ABSENT, *, tolerance: float | None = None, **given: Any
    ) -> ValidationReport:
        """Compare the per-sample gradients with a float64 loop over single samples, and with `vmap(grad)`.

        Returns a report that prints as a table (parameter, max error, worst sample, verdict); `report.ok` says whether
        all is well.
        """
        from psg_fx.checks import checks_for
        from psg_fx.validation import validate

        checks, notes = checks_for(self.settings.quantities, given)
        names = tracked_parameters(self.model, self.settings.params).names
        targets = None if targets is _ABSENT else targets
        return validate(
            lambda *batch: self(*batch, **given), self.model, self.loss_fn, inputs, targets,
            batch_dim=self.settings.batch_dim, params=names, checks=checks, tolerance=tolerance, notes=notes,
        )  # fmt: skip

    def _take_apart(self, inputs: Any, targets: Any = _ABSENT) -> Call:
        given = ((), {}) if targets is _ABSENT else _arguments(targets)
        return take_apart((_arguments(inputs), given), self.settings.batch_dim)

    def _build(self, tracked: Tracked, call: Call, quantities: Sequence[Quantity]) -> tuple[CompiledStep, Program]:
        program = Program(self.model, self.loss_fn, call)
        device, budget = cost.device(self._device(call).type), None
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


def _arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple or a dict as (args, kwargs)."""
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    if isinstance(value, Mapping):
        return (), dict(value)
    return (value,), {}


def _as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(value, (list, tuple)):
        return torch.stack([torch.as_tensor(v, dtype=dtype, device=device) for v in value])
    return torch.as_tensor(value, dtype=dtype, device=device).contiguous()


__all__ = ["PerSampleModule", "StepOutput", "transform"]
