"""`transform(model)` without a loss: the model itself, whose `backward()` leaves `grad_sample` on its parameters.

The joint graph takes the cotangents of the model's outputs, is split by the min-cut partitioner, both halves are
compiled, and one `autograd.Function` joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.garbage import first_without_collection
from psg_fx.graph import facts
from psg_fx.graph.facts import LEFT_BEHIND, OutputSpec
from psg_fx.graph.history import History, copy_graph
from psg_fx.passes.compile.own_memory import OwnMemory
from psg_fx.passes.pipeline import Asked, run_pipeline
from psg_fx.program.ambient import not_taken_apart
from psg_fx.program.arguments.call import Call
from psg_fx.program.program import Program
from psg_fx.program.state import IN_PLACE, Tracked, holder
from psg_fx.progress import Progress
from psg_fx.step import mistakes
from psg_fx.step.binding import Binding, no_samples, plain_mode
from psg_fx.step.first_answer import OfOneSample, of_one_sample
from psg_fx.step.grad_samples import Ticket, begin, clear, deliver, drop_stale
from psg_fx.step.module import PerSampleModule
from psg_fx.step.own_code import blamed
from psg_fx.tensors import apart_from, places_of, storage_of
from psg_fx.torch_private.graphs import partition
from psg_fx.torch_private.inductor import stance
from psg_fx.torch_private.ops import as_no_view

_FORWARD = ("output", *LEFT_BEHIND)


class DropInModule(PerSampleModule):
    """The model with a backward that leaves per-sample gradients: the counterpart of `call_for_per_sample_grads`."""

    _former: SplitStep | None = None

    @not_taken_apart
    @first_without_collection
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output.  `backward()` of any loss on it sets `p.grad_sample`, `[B, *shape]`, and leaves `p.grad`
        alone.  A `grad_sample` of an earlier call is dropped if a parameter has been written since (an optimizer's
        step); else `accumulate=True` makes a list of both, and otherwise the call is refused.

        Raises:
            BadArgument: a parameter still has a `grad_sample`, or the inputs disagree on the batch size.
        """
        mistakes.check_outside()
        call = self._apart((args, kwargs))
        mistakes.refuse_rows(
            call, "a step", "transform(model, batch_dim=psg_fx.Rows(...))",
            "give the loss of each sample: psg_fx.transform(model, loss_fn, batch_dim=...)",
        )  # fmt: skip
        tracked = self._tracked()
        step: SplitStep = self._look_up(call, tracked, lambda: self._build(tracked, call))
        ticket = None
        if torch.is_grad_enabled():
            mistakes.check_graphs(call, self.model, tracked)
            if step is not self._former:  # other parameters may have been asked of that one
                drop_stale(self.model.parameters())
                self._former = step
            ticket = begin(step.parameters(), self.settings.accumulate, self.settings.loss_reduction == "mean")
        with blamed(self.model, None, call):
            flat = step.run(call, ticket)
        return step.program.output.rebuild(flat, call.batch_size())

    def export(self, *args: Any, **kwargs: Any) -> Path:
        """Refused: a file has no parameters to leave anything on."""
        raise BadArgument(
            "export needs a loss", where="step.export(path, ...)",
            why="without one a step leaves grad_sample on the model's parameters, and a file has none",
            fix="psg_fx.transform(model, loss_fn, quantities=...).export(path, inputs, targets)",
        )  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters: `grad` as every module does, and `grad_sample`."""
        super().zero_grad(set_to_none)
        clear(self.model.parameters())

    def _build(self, tracked: Tracked, call: Call) -> tuple[SplitStep, Program]:
        program = Program(self.model, None, call)
        wanted = tuple(t.requires_grad for t in call.tensors)
        device = self.settings.rates_of(self._device(call))
        history = History(progress=Progress(self.settings.progress))
        asked = Asked(self.settings.quantities, torch.float32, device, call.batch_size(), wanted)
        gm = run_pipeline(program, call, tracked.aliases, asked, history, stored=self.settings.is_compiled)

        def compiled(graph: GraphModule) -> Callable[..., Sequence[Any]]:
            return self._compiled(graph, device.name, history, facts.graph_facts(gm).rounds)

        replayed = self.settings.replays and self._device(call).type == "cuda"
        step = SplitStep(gm, history, program, compiled, overwrites=replayed)
        step.binding.check_arms(gm, call)
        if self.settings.compares_first:
            step.expected = of_one_sample(self.model, None, call, gm, step.binding)
        return step, program


class SplitStep:
    """A lowered joint graph, split into a compiled forward and a compiled backward.

    overwrites: a backward's results are those of a CUDA graph, and live until its next run.
    expected: what the first outputs must be for one sample; None once they are.
    """

    expected: OfOneSample | None = None

    def __init__(
        self,
        gm: GraphModule,
        history: History,
        program: Program,
        compiled: Callable[[GraphModule], Callable[..., Sequence[Any]]],
        overwrites: bool = False,
    ) -> None:
        self.gm, self.history, self.program, self.overwrites = gm, history, program, overwrites
        self.binding = Binding(gm, program.model, None)
        joint, self.outputs, self.results = _ordered(gm)
        forward, backward = partition(joint, len(self.outputs))
        history.graphs.keep("forward", forward)
        history.graphs.keep("backward", backward)
        self.detached = [spec.field == facts.DETACHED for _, spec in self.outputs if spec.kind == "output"]
        self.order = _saved_order(forward, backward, joint)
        self.forward, self.backward = compiled(forward), compiled(backward)
        self._own_memory = OwnMemory()
        self._owners = {s.name: holder(program.model, None, s.target) for s in self.binding.specs if s.tracked}

    def parameters(self) -> dict[str, torch.Tensor]:
        """The tracked parameters, as they are now."""
        with IN_PLACE:
            return {name: group[key] for name, (group, key) in self._owners.items()}

    def run(self, call: Call, ticket: Ticket | None) -> list[torch.Tensor]:
        """The model's tensor outputs; they carry the backward.  ticket: of the call, None without gradients."""
        with plain_mode():
            arguments = self.binding.arguments(call, {})
        anchor = torch.zeros((), requires_grad=True)
        apply: Callable[..., tuple[torch.Tensor, ...]] = _Joined.apply
        return list(apply(self, call, ticket, arguments, anchor, *call.tensors))

    def forward_results(self, arguments: list[torch.Tensor], call: Call) -> tuple[list[torch.Tensor], list[Any]]:
        """The model's outputs, and what the backward needs.  Buffers are written."""
        if call.batch_size() == 0:
            everything = no_samples(self.gm, call.tensors[0].device)
            return [everything[i] for i, spec in self.outputs if spec.kind == "output"], []
        with plain_mode():
            # the old value of a buffer may be the buffer itself, and the backward reads it once that is written
            results = apart_from(self.binding.buffers(), self.forward(*arguments))
            ordered: list[Any] = [None] * len(self.binding.outputs)
            for (index, _), value in zip(self.outputs, results, strict=False):
                ordered[index] = value
            kept = [v for (_, spec), v in zip(self.outputs, results, strict=False) if spec.kind == "output"]
            if (expected := self.expected) is not None:  # another thread may answer first
                self.binding.check(ordered.__getitem__)
                expected.require(kept, call, self.gm, self.binding, arguments)
                self.expected = None
            self.binding.write_back(ordered, call)
        return kept, [results[i] for i in self.order]

    def backward_results(self, arguments: list[Any], call: Call) -> Sequence[torch.Tensor]:
        """The per-sample gradients, and those of the inputs."""
        if call.batch_size() == 0:
            everything = no_samples(self.gm, call.tensors[0].device)
            return [everything[i] for i, _ in self.results]
        with plain_mode():
            return self._own_memory.of(self.backward(*arguments), arguments, (call.batch_size(), stance()))


class _Joined(torch.autograd.Function):
    """The two compiled halves as one differentiable function of the inputs."""

    @staticmethod
    def forward(
        ctx: Any, step: SplitStep, call: Call, ticket: Ticket, arguments: list[Any], anchor: Any, *inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        outputs, saved = step.forward_results(arguments, call)
        outputs = [
            v.detach() if apart else v for v, apart in zip(_no_views(outputs, saved), step.detached, strict=True)
        ]
        constant = [v for v, apart in zip(outputs, step.detached, strict=True) if apart or not v.is_floating_point()]
        ctx.step, ctx.call, ctx.ticket, ctx.anchor = step, call, ticket, anchor
        ctx.tensors = [isinstance(v, torch.Tensor) for v in saved]
        ctx.others = [v for v in saved if not isinstance(v, torch.Tensor)]
        ctx.save_for_backward(*(v for v in saved if isinstance(v, torch.Tensor)))
        ctx.mark_non_differentiable(*constant)
        ctx.like = [(torch.empty_like(v, device="meta"), v.device) for v in outputs if v.is_floating_point()]
        ctx.floating = [v.is_floating_point() for v in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            found = _Joined._computed(ctx, gradients)
        if not torch.is_grad_enabled():
            return found
        once: Callable[..., torch.Tensor] = _Once.apply
        # they also depend on parameters and inputs, in place of which the anchor wants a gradient
        return tuple([None if value is None else once(value, ctx.anchor, *gradients) for value in found])

    @staticmethod
    def _computed(ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        step: SplitStep = ctx.step
        rest, others = (tensor.detach() for tensor in ctx.saved_tensors), iter(ctx.others)
        saved = [next(rest) if is_tensor else next(others) for is_tensor in ctx.tensors]
        floating = [g for g, is_float in zip(gradients, ctx.floating, strict=True) if is_float]
        tangents = [_laid_out(g, like, device) for g, (like, device) in zip(floating, ctx.like, strict=True)]
        found = step.backward_results([*saved, *tangents], ctx.call)
        return (None, None, None, None, None, *_deliver(ctx, step, found))


def _no_views(outputs: Sequence[torch.Tensor], saved: Sequence[Any]) -> list[torch.Tensor]:
    """The outputs, which the caller may write into, as what an op makes: torch lets nobody write into views that come
    out of a function of one's own.  What shares memory with what is saved is copied, as only one and the same tensor
    says that it was written into; those that share memory with each other stay views.
    """
    places = list(map(storage_of, outputs))
    kept = places_of(saved)

    def own(value: torch.Tensor, place: int | None) -> torch.Tensor:
        if place in kept:
            return value if any(value is each for each in saved) else value.clone()
        own_memory = value._is_view() and places.count(place) == 1
        return as_no_view(value) if own_memory else value

    return list(map(own, outputs, places))


class _Once(torch.autograd.Function):
    """A value computed from these tensors; only its gradient is refused."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *tensors: Any) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotYetSupported(
            "gradients of gradients of a step without a loss", where="transform(model)",
            why="what its backward computes has no backward of its own",
            fix="take inner gradients in the model's own forward, by torch.autograd.grad(..., create_graph=True) "
            "(docs/guides/derivatives.md)",
        )  # fmt: skip


def _laid_out(gradient: torch.Tensor | None, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The gradient of an output (None: zero) in the memory order of the output, for which the backward was traced."""
    if gradient is None:
        return torch.zeros_like(like, device=device)
    if gradient.stride() == like.stride():
        return gradient
    return torch.empty_like(like, device=device).copy_(gradient)


def _deliver(ctx: Any, step: SplitStep, found: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Set `grad_sample` on every tracked parameter; return the gradients of the inputs."""
    scale = ctx.call.batch_size() if ctx.ticket.mean else 1
    by_input: dict[str, torch.Tensor] = {}
    by_parameter: dict[str, torch.Tensor] = {}
    for (_, spec), value in zip(step.results, found, strict=True):
        if spec.field == "grads":
            by_parameter[spec.name] = value * scale if scale != 1 else value
        else:
            by_input[spec.name] = value
    deliver(ctx.ticket, step.parameters(), by_parameter, step.overwrites)
    names = [n.name for n in facts.placeholders(step.gm) if facts.input_spec(n).kind == "input"]
    return [by_input.get(name) for name in names]


Numbered = tuple[int, OutputSpec]


def _ordered(gm: GraphModule) -> tuple[GraphModule, list[Numbered], list[Numbered]]:
    """The joint graph as the partitioner wants it: forward results first, inputs named primals and tangents.

    Also where each forward result and each backward result stands among the outputs of `gm`.
    """
    joint = copy_graph(gm)
    placed = list(enumerate(facts.graph_facts(gm).outputs))
    forward = [(i, spec) for i, spec in placed if spec.kind in _FORWARD]
    backward = [(i, spec) for i, spec in placed if spec.kind not in _FORWARD]
    values = facts.outputs(joint)
    joint.graph.output_node().args = (tuple(values[i] for i, _ in forward + backward),)
    for index, node in enumerate(facts.placeholders(joint)):
        kind = "tangents" if facts.input_spec(node).kind == "tangent" else "primals"
        node.name = node.target = f"{kind}_{index}"
    joint.recompile()
    return joint, forward, backward


def _saved_order(forward: GraphModule, backward: GraphModule, joint: GraphModule) -> list[int]:
    """For each placeholder of the backward but the tangents: which output of the forward it is."""
    tangents = {n.name for n in facts.placeholders(joint) if facts.input_spec(n).kind == "tangent"}
    (values,) = forward.graph.output_node().args
    place = {value.name: i for i, value in enumerate(values) if isinstance(value, Node)}  # type: ignore[arg-type]
    return [place[n.name] for n in facts.placeholders(backward) if n.name not in tangents]
