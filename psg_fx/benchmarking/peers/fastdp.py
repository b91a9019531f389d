"""fastDP: book-keeping, one backward pass whose saved tensors are used twice (arXiv:2210.00038).

It is installed from a checkout of awslabs/fast-differential-privacy: no package registry has it.
"""

from __future__ import annotations

import contextlib
import io

from psg_fx.benchmarking.peers.adapters import CannotBeAsked, Own
from psg_fx.benchmarking.problem import Computation, Problem
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.reference.definitions import Answer


def book_keeping(problem: Problem, quantity: ClippedSum) -> Computation:
    """Its hybrid mode "MixOpt" without noise: the backward pass leaves the clipped sum as `private_grad`."""
    from fastDP import PrivacyEngine

    own = Own.of(problem)
    if not own.batch_first:
        raise CannotBeAsked("fastDP takes samples in dim 0 only")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it finds
        PrivacyEngine(
            own.model,
            batch_size=problem.batch.size,
            sample_size=problem.batch.size,
            max_grad_norm=float(quantity.max_norm),
            num_steps=1,
            noise_multiplier=0.0,
            clipping_mode="MixOpt",
            clipping_fn="Abadi",
            loss_reduction=own.reduction,
        )

    def run() -> Answer:
        own.backward(own.model)
        found = own.take("private_grad")
        for p in own.params.values():
            del p.private_grad  # type: ignore[attr-defined]
        return found

    return run
