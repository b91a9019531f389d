"""Where torch's own backward is wrong for a batch of one, it is helped.

That of a batch norm on running statistics, on a CPU, reads a cotangent that lies transposed in memory as if it did not
(torch 2.11 to 2.15), as behind `bn(x).flatten(2).transpose(1, 2).contiguous()`.  A contiguous one is read rightly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

BATCH_NORMS = (torch.batch_norm, nn.functional.batch_norm)


def in_order(found: Tensor) -> Tensor:
    """The result of a batch norm, whose cotangent will be contiguous."""
    if found.requires_grad:
        found.register_hook(Tensor.contiguous)
    return found


def helped(batch_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with such results."""
    return lambda *args, **kwargs: in_order(batch_norm(*args, **kwargs))


__all__ = ["BATCH_NORMS", "helped", "in_order"]
