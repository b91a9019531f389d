"""Connectionist temporal classification as one op a batch, `[B]` losses (Graves et al. 2006).

Torch's own op returns its table of log-probabilities too, whose size depends on the longest target, so that no graph
has a place for it. Here it stays inside: the backward computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from psg_fx.op_table import under_autograd
from psg_fx.ops.define import define_op

aten = torch.ops.aten
_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"


def _losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """-log p(target[b]) `[B]`; log_probs `[T, B, C]`, targets `[B, S]`, lengths `[B]`."""
    found: Tensor = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    return torch.where(found.isinf(), torch.zeros_like(found), found) if zero_infinity else found.clone()


def _gradient(
    cotangent: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    given = (log_probs, targets, input_lengths, target_lengths)
    losses, table = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    found: Tensor = aten._ctc_loss_backward.Tensor(cotangent, *given, losses, table, blank, zero_infinity)
    return found


ctc = define_op(
    f"ctc({_GIVEN}) -> Tensor", _losses, lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1])
)  # fmt: skip
ctc_backward = define_op(
    f"ctc_backward(Tensor cotangent, {_GIVEN}) -> Tensor", _gradient,
    lambda cotangent, log_probs, *_: log_probs.new_empty(log_probs.shape),
)  # fmt: skip


class _Differentiable(Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.save_for_backward(*given[:4])
        ctx.options = given[4:]
        losses: Tensor = ctc(*given)
        return losses

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        return (ctc_backward(cotangent, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


@under_autograd(ctc)
def _differentiable(*given: Any) -> Any:
    return _Differentiable.apply(*given)  # type: ignore[no-untyped-call]
