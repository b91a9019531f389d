"""BackPACK (arXiv:1912.10985): extensions of the backward pass, module by module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psg_fx.benchmarking.peers.adapters import CannotBeAsked, Own, outputs_of, quiet
from psg_fx.benchmarking.problem import Computation, Problem, from_grads
from psg_fx.quantities.base import Quantity
from psg_fx.reference.definitions import Answer


def gradients(problem: Problem, quantity: Quantity) -> Computation:
    """`BatchGrad`: the samples' shares in the gradient of the sum of their losses; then the quantity."""
    from backpack.extensions import BatchGrad

    own, given = _extended(problem), problem.given(quantity)

    def run() -> Answer:
        _backward(own, BatchGrad())
        return from_grads(quantity, own.take("grad_batch"), given)

    return run


def norms(problem: Problem) -> Computation:
    """`BatchL2Grad`: the squared norms of these shares by parameter, `[B]` each, without the shares themselves."""
    from backpack.extensions import BatchL2Grad

    own = _extended(problem)

    def run() -> Answer:
        _backward(own, BatchL2Grad())
        found: Tensor = torch.stack(list(own.take("batch_l2").values())).sum(0).sqrt()
        return found

    return run


def _extended(problem: Problem) -> Own:
    from backpack import extend

    own = Own.of(problem)
    if not own.batch_first:
        raise CannotBeAsked("BackPACK takes samples in dim 0 only")
    extend(own.model)
    return own


def _backward(own: Own, extension: Any) -> None:
    """One backward pass with an extension, which leaves its results on every parameter."""
    from backpack import backpack

    with quiet(), backpack(extension):
        own.losses(outputs_of(own.problem, own.model)).sum().backward()
