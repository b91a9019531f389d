"""Equal parts of a dim whose size follows the batch: as many for every batch size.

    z [2B, ..]:   z.chunk(2) = z[:B], z[B:]        z.split(B) the same

Torch counts the parts of the size at hand, and asks for a number.
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor

from psg_fx.graph import facts
from psg_fx.op_table import at_capture


@at_capture(torch.chunk, Tensor.chunk)
def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """So many parts."""
    parts = _parts(input, facts.expr(input.shape[dim]) / chunks, dim) if chunks > 0 else None
    return torch.chunk(input, chunks, dim) if parts is None else parts


@at_capture(torch.split, Tensor.split)
def split(
    tensor: Tensor, split_size_or_sections: int | list[int] | None = None, dim: int = 0, split_size: int | None = None
) -> tuple[Tensor, ...]:
    """Parts of this size (a list: of these sizes)."""
    size = split_size if split_size_or_sections is None else split_size_or_sections
    parts = _parts(tensor, facts.expr(size), dim) if isinstance(size, (int, torch.SymInt)) else None
    return torch.split(tensor, size, dim) if parts is None else parts  # type: ignore[arg-type]


def _parts(x: Tensor, size: sympy.Expr, dim: int) -> tuple[Tensor, ...] | None:
    """Parts of this size, if the dim follows the batch and they are as many for every batch size."""
    if not isinstance(x.shape[dim], torch.SymInt) or size == 0:
        return None
    count = sympy.cancel(facts.expr(x.shape[dim]) / size)
    if not count.is_Integer or not size.free_symbols or sympy.cancel(size).as_numer_denom()[1] != 1:
        return None
    one = x.shape[dim] // int(count)
    return tuple(x.narrow(dim, k * one, one) for k in range(int(count)))
