"""What `psg_fx.benchmark` measures: ordinary training steps, the loop, vmap, psg_fx itself, and its peers, each per
quantity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_unflatten

from psg_fx.api import transform
from psg_fx.benchmarking.peers import peers_for
from psg_fx.benchmarking.problem import (
    ORDINARY,
    Asked,
    Computation,
    Contender,
    Problem,
    by_label,
    from_grads,
    is_plain_clipping,
)
from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.names import USUAL
from psg_fx.quantities.sums import Grads
from psg_fx.reference.by_vmap import vmap_step
from psg_fx.reference.definitions import Answer, ByName
from psg_fx.reference.loop import gradients
from psg_fx.reference.state import called_with
from psg_fx.step.settings import FUSED_KERNELS, KEPT_DTYPE


def _mean(loss: Tensor) -> Tensor:
    return loss.mean() if loss.dim() else loss


def _named(problem: Problem, grads: Sequence[Tensor]) -> ByName:
    return dict(zip(problem.wanted, grads, strict=True))


def ordinary_eager(problem: Problem) -> Computation:
    """Forward, loss, `torch.autograd.grad`."""
    params = list(problem.wanted.values())

    def run() -> Answer:
        return _named(problem, gradients(_mean(problem.program(problem.inputs, problem.targets)), params))

    return run


REPLAYED = "reduce-overhead"
"""The mode in which a device replays its kernels without being told each (CUDA graphs)."""
FUSED = {FUSED_KERNELS: True}
ROUNDED = {KEPT_DTYPE: torch.bfloat16}


def ordinary_compiled(problem: Problem, *, mode: str | None = None) -> Computation:
    """`torch.compile` of model and loss, then `torch.autograd.grad`: a forward and a backward graph."""
    compiled = torch.compile(problem.program, dynamic=False, backend=problem.backend, mode=mode)
    params = list(problem.wanted.values())

    def run() -> Answer:
        if mode == REPLAYED:
            torch.compiler.cudagraph_mark_step_begin()
        return _named(problem, gradients(_mean(compiled(problem.inputs, problem.targets)), params))

    return run


def ordinary_one_graph(problem: Problem) -> Computation:
    """Forward and backward traced by `make_fx` into one graph, with parameters and batch as inputs, then compiled."""
    (leaves, spec), program = problem.flat, problem.program
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    count = len(problem.wanted)

    def joint(*args: Tensor) -> list[Tensor]:
        params = [p.detach().requires_grad_() for p in args[:count]]
        given = iter(args[count:])
        filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        named = {f"model.{name}": p for name, p in zip(problem.wanted, params, strict=True)}
        with torch.enable_grad():
            loss = _mean(called_with(program, named, tuple(tree_unflatten(filled, spec))))
            return gradients(loss, params)

    args = [*(p.detach() for p in problem.wanted.values()), *tensors]
    compiled = torch.compile(make_fx(joint)(*args), dynamic=False, backend=problem.backend)

    def run() -> Answer:
        with torch.no_grad():
            return _named(problem, compiled(*args))

    return run


def loop(problem: Problem, quantity: Quantity) -> Computation:
    """One forward and backward per sample (of rows one backward, through the whole batch), stacked at the end."""
    params, given = list(problem.wanted.values()), problem.given(quantity)

    def run() -> Answer:
        each = [gradients(loss, params, kept=problem.in_rows) for loss in problem.losses()]
        grads = _named(problem, [torch.stack(column) for column in zip(*each, strict=True)])
        return from_grads(quantity, grads, given)

    return run


def vmapped(problem: Problem, quantity: Quantity, *, compiled: bool, mode: str | None = None) -> Computation:
    """`torch.func.vmap(grad)`, then the quantity from the materialised gradients; optionally compiled as a whole."""
    each = vmap_step(*problem.call, batch_dim=problem.batch_dim)
    given = problem.given(quantity)

    def step() -> Answer:
        return from_grads(quantity, each()[0], given)

    fast = torch.compile(step, dynamic=False, backend=problem.backend, mode=mode) if compiled else step

    def run() -> Answer:
        if mode == REPLAYED:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return fast()

    return run


def psg(
    problem: Problem, quantity: Quantity, *, compiled: bool, reuse: bool = False, mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Computation:  # fmt: skip
    """`psg_fx.transform` with the lowered graph compiled, or run as it is; `reuse`: in memory of former outputs."""
    step = transform(
        problem.model,
        problem.loss_fn,
        quantities=quantity,
        batch_dim=problem.batch_dim,
        backend=problem.backend if compiled else "eager",
        mode=mode,
        options=options,
        dynamic=False,
        reuse_outputs=reuse,
    )
    given = problem.given(quantity)

    def run() -> Answer:
        answer: Answer = getattr(step(*problem.arguments, **given), quantity.field)
        return answer

    return run


def every(quantities: Mapping[str, Quantity]) -> Iterator[Contender]:
    """All contenders for these quantities, ordinary steps first."""
    yield Contender("ordinary-eager", ORDINARY, ordinary_eager)
    yield Contender("ordinary-compiled", ORDINARY, ordinary_compiled)
    yield Contender("ordinary-one-graph", ORDINARY, ordinary_one_graph)
    yield Contender("replayed-ordinary", ORDINARY, partial(ordinary_compiled, mode=REPLAYED), usual=False)
    for label, q in quantities.items():
        usual = q == Grads()
        yield Contender("loop", label, partial(loop, quantity=q), usual)
        yield Contender("vmap", label, partial(vmapped, quantity=q, compiled=False), usual, peer=True)
        yield Contender("vmap-compiled", label, partial(vmapped, quantity=q, compiled=True), usual, peer=True)
        yield Contender("psg-eager", label, partial(psg, quantity=q, compiled=False))
        yield Contender("psg-compiled", label, partial(psg, quantity=q, compiled=True))
        yield Contender("psg-reused", label, partial(psg, quantity=q, compiled=True, reuse=True), usual=False)
        if is_plain_clipping(q):
            rounded = partial(psg, quantity=q, compiled=True, options=ROUNDED)
            yield Contender("psg-rounded", label, rounded, usual=False, rounding=2**-8)
        yield Contender("replayed-vmap", label, partial(vmapped, quantity=q, compiled=True, mode=REPLAYED), usual=False)
        yield Contender("fused-psg", label, partial(psg, quantity=q, compiled=True, options=FUSED), usual=False)
        yield Contender(
            "replayed-psg", label, partial(psg, quantity=q, compiled=True, mode=REPLAYED, reuse=True), False
        )
        yield from peers_for(label, q)


def field_of(
    quantities: Asked = tuple(USUAL), patterns: Sequence[str] | None = None, peers: bool = False
) -> list[Contender]:
    """The contenders for `quantities`, ordinary steps first; `patterns` are globs on names or labels.

    Without patterns: all but other libraries (which `peers` adds) and those who first materialise gradients to make
    another quantity of them.
    """
    known = list(every(by_label(quantities)))
    if patterns is None:
        return [c for c in known if c.usual or (peers and c.peer)]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(_matches(c, pattern) for c in known):
            raise BadArgument(
                f"no contender matches {pattern!r}",
                where="contenders",
                why=f"there are {', '.join(c.label for c in known)}",
                fix="name one of them or use a glob such as 'psg*'",
            )
    return [c for c in known if (peers and c.peer) or any(_matches(c, p) for p in patterns)]


def _matches(contender: Contender, pattern: str) -> bool:
    return fnmatchcase(contender.name, pattern) or fnmatchcase(contender.label, pattern)
