"""`psg_fx::weighted_sums`: sums over samples of gradients that lie in memory, several at once.

    y_k[i] = Σ_b w[b] x_k[b, i]

On a CUDA device a kernel of Triton (`weighted_sum_kernels.py`), which inductor takes into its graph: what
inductor writes for sums over a few rows of long tensors read a quarter of what the memory of an H200 gives
(docs/design/gpu.md).  Elsewhere plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import defined_later
from psg_fx.tensors import HALF

DTYPES = (torch.float32, *HALF)
"""Of what is summed."""


def weighted_sums(weights: torch.Tensor, values: Sequence[torch.Tensor], leave_out: bool) -> list[torch.Tensor]:
    """Float32 weights [B], values [B, n] of one dtype of `DTYPES` and one size -> their sums [n], in float32.

    leave_out: samples of weight 0 have no part in the sums, also where their values are NaN or inf.
    """
    found: list[torch.Tensor] = overload()(weights, list(values), leave_out)
    return found


@functools.cache
def overload() -> OpOverload:
    """The op, registered when it is first wanted: for that torch loads Triton, where it is."""
    made: Any = torch.library.triton_op("psg_fx::weighted_sums", _sums, mutates_args=())
    made.register_fake(_fake)
    register_flop_formula([torch.ops.psg_fx.weighted_sums])(_flops)
    found: OpOverload = torch.ops.psg_fx.weighted_sums.default
    return found


defined_later(overload, "weighted_sums")


def _sums(weights: torch.Tensor, values: list[torch.Tensor], leave_out: bool) -> list[torch.Tensor]:
    if weights.device.type != "cuda":
        return by_torch(weights, values, leave_out)
    from psg_fx.ops.products import (
        weighted_sum_kernels as kernels,  # Triton is loaded where there is something to launch
    )

    sums, values = _fake(weights, values, leave_out), [value.contiguous() for value in values]
    for start in range(0, len(values), kernels.AT_ONCE):
        some = slice(start, start + kernels.AT_ONCE)
        kernels.launch(weights, values[some], sums[some], leave_out)
    return sums


def _fake(weights: torch.Tensor, values: list[torch.Tensor], leave_out: bool) -> list[torch.Tensor]:
    return [value.new_empty(value.shape[1], dtype=torch.float32) for value in values]


def by_torch(weights: torch.Tensor, values: Sequence[torch.Tensor], leave_out: bool) -> list[torch.Tensor]:
    """The same in ops of torch."""
    wide = [value.float() for value in values]
    if leave_out:
        wide = [value.masked_fill((weights == 0)[:, None], 0) for value in wide]
    return [weights @ value for value in wide]


def _flops(weights: Sequence[int], values: Sequence[Sequence[int]], *rest: Any, **shapes: Any) -> int:
    """2 · B·n of each."""
    return sum(2 * size[0] * size[1] for size in values)
