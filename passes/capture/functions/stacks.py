"""Values joined along a dim of which torch takes care: `hstack`, `vstack`, `dstack` and `column_stack`, by `cat`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from psg_fx.op_table import at_capture


@at_capture(torch.hstack)
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Vectors end to end; others along dim 1."""
    each = [torch.atleast_1d(t) for t in tensors]
    return torch.cat(each, min(each[0].dim() - 1, 1))


@at_capture(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Along dim 0; vectors are rows."""
    return torch.cat([torch.atleast_2d(t) for t in tensors])


@at_capture(torch.dstack)
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """Along dim 2, of which matrices have one more."""
    return torch.cat([torch.atleast_3d(t) for t in tensors], 2)


@at_capture(torch.column_stack)
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Along dim 1; vectors are columns."""
    return torch.cat([t.reshape(-1, 1) if t.dim() < 2 else t for t in tensors], 1)
