"""Who races in `psg_fx.benchmark`: ordinary training steps, the loop, vmap, and psg_fx itself, each per quantity.

A contender is a name, what it answers, and a `build` that turns a problem into a function of nothing running one step.
Everything that is done once (compiling wrappers, tracing) belongs to `build` or to the first call.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.errors import BadArgument
from psg_fx.reference import Batch, Loss, Named, WithLoss, gradients, one_loss, tracked, vmap_step

Answer = Tensor | Mapping[str, Tensor]
Step = Callable[[], Answer]

ORDINARY = "ordinary"
QUANTITIES = ("grads", "norms", "clipped_sum")
MAX_NORM = 1.0
"""Clipping threshold of every clipped-sum contender."""


@dataclass(frozen=True)
class Problem:
    """A model, its loss and one batch; `backend` is what the compiled contenders pass to `torch.compile`."""

    model: nn.Module
    loss_fn: Loss
    inputs: Any
    targets: Any
    batch_dim: Any = 0
    backend: str = "inductor"

    @cached_property
    def batch(self) -> Batch:
        """The batch taken apart, to slice single samples."""
        return Batch.of(self.inputs, self.targets, self.batch_dim)

    @cached_property
    def wanted(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        return tracked(self.model, None)

    @cached_property
    def program(self) -> WithLoss:
        """Model and loss as one module."""
        return WithLoss(self.model, self.loss_fn)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


@dataclass(frozen=True)
class Contender:
    """`name` computes `quantity` ("ordinary": the gradient of the batch's loss); `usual`: races unless told not to."""

    name: str
    quantity: str
    build: Callable[[Problem], Step]
    usual: bool = True

    @property
    def label(self) -> str:
        """`name/quantity`, or the name alone for an ordinary step."""
        return self.name if self.quantity == ORDINARY else f"{self.name}/{self.quantity}"


def from_grads(quantity: str, grads: Mapping[str, Tensor]) -> Answer:
    """The quantity from materialised gradients `name -> [B, *shape]`."""
    if quantity == "grads":
        return grads
    norms = torch.stack([(g.flatten(1) if g.dim() > 1 else g[:, None]).square().sum(1) for g in grads.values()])
    norm = norms.sum(0).sqrt()
    if quantity == "norms":
        return norm
    factors = (MAX_NORM / norm).clamp(max=1.0)
    return {name: torch.einsum("b,b...->...", factors, g) for name, g in grads.items()}


def _mean(loss: Tensor) -> Tensor:
    return loss.mean() if loss.dim() else loss


def _named(problem: Problem, grads: Sequence[Tensor]) -> Named:
    return dict(zip(problem.wanted, grads, strict=True))


def ordinary_eager(problem: Problem) -> Step:
    """Forward, loss, `torch.autograd.grad`."""
    params = list(problem.wanted.values())

    def run() -> Answer:
        return _named(problem, gradients(_mean(problem.program(problem.inputs, problem.targets)), params))

    return run


def ordinary_compiled(problem: Problem) -> Step:
    """`torch.compile` of model and loss, then `torch.autograd.grad`: a forward and a backward graph."""
    compiled = torch.compile(problem.program, dynamic=False, backend=problem.backend)
    params = list(problem.wanted.values())

    def run() -> Answer:
        return _named(problem, gradients(_mean(compiled(problem.inputs, problem.targets)), params))

    return run


def ordinary_one_graph(problem: Problem) -> Step:
    """Forward and backward traced by `make_fx` into one graph, with parameters and batch as inputs, then compiled."""
    batch, program = problem.batch, problem.program
    tensors = [leaf for leaf in batch.leaves if isinstance(leaf, Tensor)]
    count = len(problem.wanted)

    def joint(*args: Tensor) -> list[Tensor]:
        params = [p.detach().requires_grad_() for p in args[:count]]
        given = iter(args[count:])
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in batch.leaves]
        named = {f"model.{name}": p for name, p in zip(problem.wanted, params, strict=True)}
        with torch.enable_grad():
            loss = _mean(torch.func.functional_call(program, named, batch.tree(leaves)))
            return gradients(loss, params)

    args = [*(p.detach() for p in problem.wanted.values()), *tensors]
    compiled = torch.compile(make_fx(joint)(*args), dynamic=False, backend=problem.backend)

    def run() -> Answer:
        with torch.no_grad():
            return _named(problem, compiled(*args))

    return run


def loop(quantity: str) -> Callable[[Problem], Step]:
    """One forward and backward per sample, rows stacked at the end."""

    def build(problem: Problem) -> Step:
        params = list(problem.wanted.values())

        def run() -> Answer:
            rows = []
            for i in range(problem.batch.size):
                rows.append(gradients(one_loss(problem.program(*problem.batch.sample(i))), params))
            return from_grads(quantity, _named(problem, [torch.stack(column) for column in zip(*rows, strict=True)]))

        return run

    return build


def vmapped(quantity: str, *, compiled: bool) -> Callable[[Problem], Step]:
    """`torch.func.vmap(grad)`, then the quantity from the materialised gradients; optionally compiled as a whole."""

    def build(problem: Problem) -> Step:
        each = vmap_step(problem.model, problem.loss_fn, problem.inputs, problem.targets, batch_dim=problem.batch_dim)

        def step() -> Answer:
            return from_grads(quantity, each()[0])

        fast = torch.compile(step, dynamic=False, backend=problem.backend) if compiled else step

        def run() -> Answer:
            with torch.no_grad():
                return fast()

        return run

    return build


def opacus(problem: Problem) -> Step:
    """Opacus' hooks, where it is installed: an ordinary backward that leaves `grad_sample` on every parameter.

    They are asked about samples in dim 0 and a loss that is the mean of those of the samples.
    """
    from opacus.grad_sample import GradSampleModule  # type: ignore[import-untyped]

    module = GradSampleModule(copy.deepcopy(problem.model), loss_reduction="mean")
    program = WithLoss(module, problem.loss_fn)
    found = tracked(module._module, None)

    def run() -> Answer:
        for p in found.values():
            p.grad = p.grad_sample = None  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            _mean(program(problem.inputs, problem.targets)).backward()
        return {name: p.grad_sample for name, p in found.items()}  # type: ignore[attr-defined]

    return run


def psg(quantity: str, *, compiled: bool, reuse: bool = False) -> Callable[[Problem], Step]:
    """`psg_fx.transform` with the lowered graph compiled, or run as it is; `reuse`: in memory of former outputs."""

    def build(problem: Problem) -> Step:
        import psg_fx  # at the top it would be a circle: psg_fx itself exports benchmark

        asked: dict[str, Callable[[], psg_fx.Quantity]] = {
            "grads": psg_fx.Grads,
            "norms": psg_fx.Norms,
            "clipped_sum": lambda: psg_fx.ClippedSum(max_norm=MAX_NORM),
        }
        step = psg_fx.transform(
            problem.model,
            problem.loss_fn,
            quantities=asked[quantity](),
            batch_dim=problem.batch_dim,
            backend=problem.backend if compiled else "eager",
            dynamic=False,
            reuse_outputs=reuse,
        )
        batch = (problem.inputs,) if problem.targets is None else (problem.inputs, problem.targets)

        def run() -> Answer:
            answer: Answer = getattr(step(*batch), quantity)
            return answer

        return run

    return build


def field_of(quantities: Sequence[str] = QUANTITIES, patterns: Sequence[str] | None = None) -> list[Contender]:
    """The contenders for `quantities`, ordinary steps first; `patterns` are globs on names or labels.

    Without patterns: all but those who first materialise gradients to make a norm or a clipped sum of them.
    """
    if unknown := [q for q in quantities if q not in QUANTITIES]:
        raise BadArgument(
            f"no contender computes {unknown[0]!r}",
            where="quantities",
            why=f"there are contenders for {', '.join(QUANTITIES)}",
            fix="choose among them",
        )
    every = [
        Contender("ordinary-eager", ORDINARY, ordinary_eager),
        Contender("ordinary-compiled", ORDINARY, ordinary_compiled),
        Contender("ordinary-one-graph", ORDINARY, ordinary_one_graph),
    ]
    for q in quantities:
        usual = q == "grads"
        every += [
            Contender("loop", q, loop(q), usual),
            Contender("vmap", q, vmapped(q, compiled=False), usual),
            Contender("vmap-compiled", q, vmapped(q, compiled=True), usual),
            Contender("psg-eager", q, psg(q, compiled=False)),
            Contender("psg-compiled", q, psg(q, compiled=True)),
            Contender("psg-reused", q, psg(q, compiled=True, reuse=True), usual=False),
        ]
        if usual:
            every.append(Contender("opacus-hooks", q, opacus, usual=False))
    if patterns is None:
        return [c for c in every if c.usual]
    for pattern in patterns:
        if not any(fnmatchcase(c.name, pattern) or fnmatchcase(c.label, pattern) for c in every):
            raise BadArgument(
                f"no contender matches {pattern!r}",
                where="contenders",
                why=f"there are {', '.join(c.label for c in every)}",
                fix="name one of them or use a glob such as 'psg*'",
            )
    return [c for c in every if any(fnmatchcase(c.name, p) or fnmatchcase(c.label, p) for p in patterns)]
