"""Where torch's own backward is wrong for a batch of one, it is helped.

That of a batch norm on running statistics, on a CPU, reads a cotangent that lies transposed in memory as if it did not
(torch 2.11 to 2.15), as behind `bn(x).flatten(2).transpose(1, 2).contiguous()`.  A contiguous one is read rightly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from psg_fx.torch_private.patching import wrapped_here

BATCH_NORMS = (torch.batch_norm, nn.functional.batch_norm)


def in_order(found: Tensor) -> Tensor:
    """The result of a batch norm, whose cotangent will be contiguous."""
    if found.requires_grad:
        found.register_hook(Tensor.contiguous)
    return found


def backwards_helped() -> contextlib.AbstractContextManager[None]:
    """While open, layers in this thread have such results."""

    def helped(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def batch_norm(*args: Any, **kwargs: Any) -> Tensor:
            return in_order(own(*args, **kwargs))

        return batch_norm

    return wrapped_here(nn.functional, "batch_norm", helped)


__all__ = ["BATCH_NORMS", "backwards_helped", "in_order"]
