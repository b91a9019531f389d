"""Ops of psg_fx that multiply two matrices as `addmm` does, each by a way of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import define_op


def define_product(
    name: str, run: Callable[[Tensor, Tensor, Tensor | None], Tensor], library: str | None = None
) -> Any:
    """The op `psg_fx::name`, a[m, k] b[k, n] + bias[n] or without it.  library: as of `define_op`."""
    op = define_op(
        f"{name}(Tensor a, Tensor b, Tensor? bias) -> Tensor", run,
        lambda a, b, bias: a.new_empty((a.shape[0], b.shape[1])), by_torch, library,
    )  # fmt: skip
    register_flop_formula(getattr(torch.ops.psg_fx, name))(_flops)
    return op


def by_torch(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """The same by the BLAS of torch."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _flops(a: Sequence[int], b: Sequence[int], *rest: Any, **shapes: Any) -> int:
    """2 · m·k·n."""
    return 2 * a[0] * a[1] * b[1]
