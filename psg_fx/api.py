"""`psg_fx.transform`: the public interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule

from psg_fx import cost, facts
from psg_fx.arguments import BatchDim, Call, take_apart
from psg_fx.baked import Reads, values_read
from psg_fx.errors import BadArgument
from psg_fx.passes.capture import Program
from psg_fx.passes.compile import compile_graph
from psg_fx.passes.pipeline import run_pipeline
from psg_fx.passes.runner import History
from psg_fx.quantity import Grads, Quantity
from psg_fx.state import ParamFilter, Tracked, capture_key, tracked_parameters
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
    loss_reduction: str = "sum",
    backend: str = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
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
        loss_reduction: without `loss_fn` only: "sum", or "mean" if the loss is a mean over the batch.
        backend, mode, options: as in `torch.compile`; "eager" runs the lowered graph as it is.
        dynamic: None: the first batch size is compiled statically, the next one dynamically; True: dynamically from the
            start; False: a graph for every size.

    Returns:
        A module: `step(inputs, targets)` with a loss, `step(*args, **kwargs)` without.

    Raises:
        BadArgument: an argument that does not mean anything.  At the first call: SamplesMixed, NotYetSupported,
        CaptureFailed (all are ValueError).
    """
    asked = (
        (Grads(),) if quantities is None else (quantities,) if isinstance(quantities, Quantity) else tuple(quantities)
    )
    _check_quantities(asked)
    _check_choice("backend", backend, None)
    _check_choice("loss_reduction", loss_reduction, ("sum", "mean"))
    if not isinstance(model, nn.Module):
        raise BadArgument(
            f"model is a {type(model).__name__}, not an nn.Module", where="transform(model)",
            why="its parameters are found by name", fix="wrap the function in an nn.Module",
        )  # fmt: skip
    if loss_fn is None:
        if quantities is not None:
            raise BadArgument(
                "quantities need a loss", where="transform(quantities=...)",
                why="without loss_fn the step leaves grad_sample on the parameters, and nothing else",
                fix="pass loss_fn, or leave quantities out",
            )  # fmt: skip
        from psg_fx.drop_in import DropInModule

        return DropInModule(model, None, asked, params, batch_dim, loss_reduction, backend, mode, options, dynamic)
    return LossModule(model, loss_fn, asked, params, batch_dim, loss_reduction, backend, mode, options, dynamic)


def _check_quantities(quantities: Sequence[Any]) -> None:
    for quantity in quantities:
        if not isinstance(quantity, Quantity):
            name = quantity.__name__ + " (a class: call it)" if isinstance(quantity, type) else repr(quantity)
            raise BadArgument(
                f"{name} is not a quantity", where="transform(quantities=...)",
                why="each quantity fills a field of the output",
                fix="use psg_fx.Grads(), Norms(), ClippedSum(max_norm), WeightedSum(), MeanGrad()",
            )  # fmt: skip
    fields = [q.field for q in quantities]
    twice = {f for f in fields if fields.count(f) > 1}
    if twice or not quantities:
        raise BadArgument(
            f"two quantities fill out.{min(twice)}" if twice else "no quantity is asked for",
            where="transform(quantities=...)", why="each quantity fills a field of its own",
            fix="ask for each kind once; make a second step for others" if twice else "ask for one, e.g. Grads()",
        )  # fmt: skip


def _check_choice(name: str, value: str, allowed: tuple[str, ...] | None) -> None:
    known = allowed or ("eager", *torch.compiler.list_backends(exclude_tags=()))
    if value not in known:
        raise BadArgument(
            f"{name}={value!r} is unknown", where=f"transform({name}=...)", why=f"known are {', '.join(known)}",
            fix="use one of those",
        )  # fmt: skip


class PerSampleModule(nn.Module):
    """What `transform` returns.  Its parameters, buffers and state_dict are the model's own."""

    # Set past nn.Module, so that neither becomes a submodule and renames the parameters.
    model: nn.Module
    loss_fn: Any

    def __init__(
        self, model: nn.Module, loss_fn: Any, quantities: tuple[Quantity, ...], params: ParamFilter,
        batch_dim: BatchDim, loss_reduction: str, backend: str, mode: str | None, options: dict[str, Any] | None,
        dynamic: bool | None,
    ) -> None:  # fmt: skip
        super().__init__()
        object.__setattr__(self, "model", model)
        for group in _STATE:
            object.__setattr__(self, group, getattr(model, group))
        object.__setattr__(self, "loss_fn", loss_fn)
        self.quantities, self.params = quantities, params
        self.batch_dim, self.loss_reduction = batch_dim, loss_reduction
        self.backend, self.mode, self.options, self.dynamic = backend, mode, options, dynamic
        self._steps: dict[Any, Any] = {}
        self._reads: dict[Any, Reads] = {}
        self._one_size: set[Any] = set()
        self._last: Any = None

    def train(self, mode: bool = True) -> PerSampleModule:
        """Set the model's training mode."""
        self.training = mode
        self.model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state_dict."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.model.load_state_dict(*args, **kwargs)

    @property
    def graphs(self) -> dict[str, GraphModule]:
        """The graph after each pass of the last capture, by stage name."""
        return dict(self._history("graphs").graphs)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds spent in each pass of the last capture."""
        return {step.name: step.seconds for step in self._history("timings").steps}

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

    def explain(self) -> str:
        """A table of every site: where the samples lie, what is computed, how, at what cost, and why not otherwise."""
        from psg_fx.report import explain

        return explain(self.graphs)

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

    def _look_up(self, call: Call, build: Callable[[Tracked], Any]) -> Any:
        """The compiled step for the model as it is now, made if it is new."""
        tracked = tracked_parameters(self.model, self.params)
        key = capture_key(self.model, self.loss_fn, tracked, call)
        reads = self._reads.setdefault(key, set())
        size = call.batch_size() if self.dynamic is False or key in self._one_size else None
        values = values_read(reads)
        if (key, values, size) not in self._steps:
            step = build(tracked)
            known = facts.graph_facts(step.gm)
            reads |= known.data["reads"]
            values = values_read(reads)
            if size is None and known.data["one_size"]:
                self._one_size.add(key)
                size = call.batch_size()
                warnings.warn(known.notes[0], stacklevel=5)
            self._steps[key, values, size] = step
        self._last = self._steps[key, values, size]
        return self._last


class LossModule(PerSampleModule):
    """A step with a loss: `step(inputs, targets)` returns the losses and every quantity asked."""

    def forward(self, inputs: Any, targets: Any = _ABSENT, **given: Any) -> StepOutput:
        """Run the step.

        inputs: a tensor, a tuple (positional) or a dict (keyword).  targets: a tensor, a tuple, a dict, or absent.
        weights: [B], for WeightedSum.
        """
        call = self._take_apart(inputs, targets)
        step: CompiledStep = self._look_up(call, lambda tracked: self._build(tracked, call))
        return step(call, self._extras(call, given, step.binding.names))

    def validate(
        self, inputs: Any, targets: Any = _ABSENT, *, tolerance: float | None = None, **given: Any
    ) -> ValidationReport:
        """Compare the per-sample gradients with a float64 loop over single samples, and with `vmap(grad)`.

        Returns a report that prints as a table (parameter, max error, worst sample, verdict); `report.ok` says whether
        all is well.
        """
        from psg_fx.checks import checks_for
        from psg_fx.validation import validate

        checks, notes = checks_for(self.quantities, given)
        names = tracked_parameters(self.model, self.params).names
        targets = None if targets is _ABSENT else targets
        return validate(
            lambda *batch: self(*batch, **given), self.model, self.loss_fn, inputs, targets, batch_dim=self.batch_dim,
            params=names, checks=checks, tolerance=tolerance, notes=notes,
        )  # fmt: skip

    def _take_apart(self, inputs: Any, targets: Any) -> Call:
        given = ((), {}) if targets is _ABSENT else _arguments(targets)
        return take_apart((_arguments(inputs), given), self.batch_dim)

    def _build(self, tracked: Tracked, call: Call) -> CompiledStep:
        program = Program(self.model, self.loss_fn, call)
        dtype = self._extras_dtype()
        extras = [
            (name, shape, dtype)
            for quantity in self.quantities
            for name, shape in quantity.extras(tracked.names).items()
        ]
        device = cost.device(self._device(call).type)
        gm, history = run_pipeline(program, call, tracked.aliases, self.quantities, extras, device)
        run = compile_graph(gm, self.backend, self.mode, self.options, self.dynamic, device.name)
        return CompiledStep(gm, history, self.model, self.loss_fn, run)

    def _extras_dtype(self) -> torch.dtype:
        """Bounds and weights are given in float64 to a float64 model, else in float32."""
        is_double = any(p.dtype is torch.float64 for p in self.model.parameters())
        return torch.float64 if is_double else torch.float32

    def _extras(self, call: Call, given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        used: set[str] = set()
        for quantity in self.quantities:
            for name, value in quantity.values(names, given).items():
                found[name] = _as_tensor(value, self._extras_dtype(), self._device(call))
                used.add(name)
        unknown = set(given) - used
        if unknown:
            raise BadArgument(
                f"step() got {', '.join(sorted(unknown))}", where="step(inputs, targets, ...)",
                why="no quantity of this step reads it", fix="WeightedSum() reads weights=",
            )  # fmt: skip
        if "weights" in found and tuple(found["weights"].shape) != (call.batch_size(),):
            raise BadArgument(
                f"weights have shape {tuple(found['weights'].shape)}", where="step(inputs, targets, weights=...)",
                why=f"there is one weight for each of the {call.batch_size()} samples", fix="pass a [B] tensor",
            )  # fmt: skip
        return found


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
    return torch.as_tensor(value, dtype=dtype, device=device)


__all__ = ["PerSampleModule", "StepOutput", "transform"]
