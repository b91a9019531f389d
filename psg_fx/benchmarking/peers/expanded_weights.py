"""`torch.nn.utils._per_sample_grad.call_for_per_sample_grads`: torch's own, called ExpandedWeights inside."""

from __future__ import annotations

from torch.nn.utils._per_sample_grad import call_for_per_sample_grads  # private: it is a contender, not a tool

from psg_fx.benchmarking.peers.adapters import Own
from psg_fx.benchmarking.problem import Computation, Problem, from_grads
from psg_fx.quantities.base import Quantity
from psg_fx.reference.definitions import Answer


def step(problem: Problem, quantity: Quantity) -> Computation:
    """A backward through a forward whose weights leave `grad_sample`; then the quantity from it."""
    own, size, given = Own.of(problem), problem.batch.size, problem.given(quantity)
    how, first = own.reduction, own.batch_first

    def run() -> Answer:
        model = call_for_per_sample_grads(own.model, batch_size=size, loss_reduction=how, batch_first=first)
        own.backward(model)
        return from_grads(quantity, own.take("grad_sample"), given)

    return run
