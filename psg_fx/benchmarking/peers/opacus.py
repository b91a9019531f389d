"""Opacus: hooks on modules that materialise gradients, and ghost clipping, which does not (arXiv:2009.03106)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from psg_fx.benchmarking.peers.adapters import Own, outputs_of, quiet
from psg_fx.benchmarking.problem import Computation, Problem, from_grads
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.reference.definitions import Answer
from psg_fx.reference.loop import tracked


def hooks(problem: Problem, quantity: Quantity) -> Computation:
    """An ordinary backward that leaves `grad_sample` on every parameter, then the quantity from it."""
    from opacus.grad_sample import GradSampleModule

    own = _own(problem)
    module = GradSampleModule(own.model, batch_first=own.batch_first, loss_reduction=own.reduction)
    given = problem.given(quantity)

    def run() -> Answer:
        own.backward(module)
        return from_grads(quantity, own.take("grad_sample"), given)

    return run


def ghost_norms(problem: Problem) -> Computation:
    """The first of the two backward passes of ghost clipping, which leaves norms."""
    own = _own(problem)
    module = _ghost(own, max_norm=1.0)

    def run() -> Answer:
        own.backward(module)
        norms: Tensor = module.get_norm_sample()
        own.take("_norm_sample")
        return norms

    return run


def ghost_clipping(problem: Problem, quantity: ClippedSum) -> Computation:
    """Norms by one backward pass, then a second one of the losses weighted by the factors: `p.grad` is their sum."""
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    own = _own(problem)
    module = _ghost(own, float(quantity.max_norm))
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(own.params.values(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=float(quantity.max_norm),
        expected_batch_size=problem.batch.size,
        loss_reduction=own.reduction,
    )
    criterion = DPLossFastGradientClipping(module, optimizer, _Criterion(own), own.reduction)

    def run() -> Answer:
        with quiet():
            criterion(outputs_of(problem, module)).backward()
        return own.take("grad")

    return run


def _own(problem: Problem) -> Own:
    """The problem with Opacus' recurrent layers for torch's, as it asks of its users; parameters keep their names."""
    from opacus.validators import ModuleValidator

    own = Own.of(problem)
    if not any(isinstance(module, nn.RNNBase) for module in own.model.modules()):
        return own
    model = ModuleValidator.fix(own.model)
    return replace(own, model=model, params=tracked(model, None))


class _Criterion:
    """The losses of the samples, `[B]`; Opacus sets `reduction` to "none" around its call."""

    def __init__(self, own: Own) -> None:
        self.reduction, self.losses = own.reduction, own.losses

    def __call__(self, outputs: Tensor) -> Tensor:
        return self.losses(outputs)


def _ghost(own: Own, max_norm: float) -> Any:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    return GradSampleModuleFastGradientClipping(
        own.model, batch_first=own.batch_first, loss_reduction=own.reduction, max_grad_norm=max_norm
    )
