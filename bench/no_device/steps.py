"""The steps of a model that are compiled for a device that is not there: what each calls, and on which inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from no_device import attention
from psg_fx import MeanGrad, transform, zoo
from psg_fx.benchmarking.problem import Problem, from_grads
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.names import USUAL
from psg_fx.reference.by_vmap import quiet_vmap, vmap_step
from psg_fx.step.settings import FUSED_KERNELS
from psg_fx.torch_private.compiler import marked_dynamic
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.tracer import trace_fakes

Step = Callable[[], object]
FUSED = "-fused"
"""How the name of a model ends whose steps are told to have all kernels of psg_fx."""
QUANTITIES: dict[str, Quantity] = USUAL | {"mean_grad": MeanGrad()}


def steps_of(model: str, sizes: dict[str, Any], dynamic: bool) -> dict[str, Callable[[], Step]]:
    """Name -> what makes a step that has not been called yet.

    ordinary: forward and backward as one graph.  vmap_*: `vmap(grad)` as one graph, then the quantity of the gradients
    (not for every batch size: it is a contender, and one size of batch says how it compares).
    """
    fused = model.endswith(FUSED)
    ex = zoo.example(model.removesuffix(FUSED).removesuffix("-large"), **sizes)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets, ex.batch_dim)
    found: dict[str, Callable[[], Step]] = {"ordinary": partial(ordinary, problem, dynamic)}
    for name, quantity in QUANTITIES.items():
        found[name] = partial(by_psg, problem, quantity, dynamic, fused)
    if not dynamic:
        found |= {f"vmap_{name}": partial(by_vmap, problem, quantity) for name, quantity in USUAL.items()}
    return found


def by_psg(problem: Problem, quantity: Quantity, dynamic: bool, fused: bool = False) -> Step:
    step = transform(
        problem.model, problem.loss_fn, quantities=quantity, batch_dim=problem.batch_dim, dynamic=dynamic,
        progress=False, options={FUSED_KERNELS: True} if fused else None,
    )  # fmt: skip
    return lambda: step(*problem.arguments)


def ordinary(problem: Problem, dynamic: bool) -> Step:
    """The ordinary training step, compiled."""
    return _compiled(problem, ordinary_graph(problem, dynamic), dynamic)


def ordinary_graph(problem: Problem, dynamic: bool = False) -> GraphModule:
    """`(*parameters, inputs, targets)` -> gradients, as `contenders.ordinary_one_graph` has them, traced on fake
    tensors: for one batch size or for every.  A recurrent layer is unrolled (CUDA's op for it, cuDNN's, cannot be
    traced on the CPU).
    """
    count = len(problem.wanted)

    def joint(*args: torch.Tensor) -> Any:
        params = [p.detach().requires_grad_() for p in args[:count]]
        named = {f"model.{name}": p for name, p in zip(problem.wanted, params, strict=True)}
        with torch.enable_grad():
            loss = torch.func.functional_call(problem.program, named, args[count:])
            return torch.autograd.grad(loss, params)

    return _traced(problem, joint, dynamic)


def by_vmap(problem: Problem, quantity: Quantity) -> Step:
    """`contenders.vmapped`, traced into one graph as the ordinary step is."""

    def step(*args: torch.Tensor) -> Any:
        params = dict(zip(problem.wanted, args[: len(problem.wanted)], strict=True))
        inputs, targets = args[len(problem.wanted) :]
        each = vmap_step(problem.model, problem.loss_fn, inputs, targets, batch_dim=problem.batch_dim, values=params)
        with quiet_vmap():
            return from_grads(quantity, each()[0], {})

    with attention.registered():
        return _compiled(problem, _traced(problem, step, dynamic=False), dynamic=False)


def _given(problem: Problem) -> list[torch.Tensor]:
    """What the graphs take: parameters, inputs, targets."""
    return [*(p.detach() for p in problem.wanted.values()), problem.inputs, problem.targets]


def _dims(problem: Problem, dynamic: bool) -> list[int | None]:
    """Of each of these, the dim of the samples where it is a symbol."""
    of_batch = problem.batch_dim if isinstance(problem.batch_dim, tuple) else (problem.batch_dim,) * 2
    return [*[None] * len(problem.wanted), *(of_batch if dynamic else (None, None))]


def _traced(problem: Problem, function: Callable[..., Any], dynamic: bool) -> GraphModule:
    return trace_fakes(function, symbolic_inputs(_given(problem), _dims(problem, dynamic)))


def _compiled(problem: Problem, graph: GraphModule, dynamic: bool) -> Step:
    """The graph, compiled at the first call."""
    compiled = torch.compile(graph, dynamic=None if dynamic else False)
    pairs = zip(_given(problem), _dims(problem, dynamic), strict=True)
    marked = [t if d is None else marked_dynamic(t, [d]) for t, d in pairs]

    def run() -> object:
        with torch.no_grad():
            return compiled(*marked)

    return run
