"""Norms of matrices, whose op asks how many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psg_fx.op_table import at_capture

_BY_VALUES = (2, -2)
_BY_SUMS = {1: (-2, True), -1: (-2, False), math.inf: (-1, True), -math.inf: (-1, False)}
"""Along which dim absolute values are summed, and whether the largest sum is taken, or the least."""


@at_capture(torch.linalg.matrix_norm)
def matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: Any = None,
    **named: Any,
) -> Tensor:  # fmt: skip
    """‖A‖₂ = σ₁, ‖A‖₋₂ = the least σ;  ‖A‖₁ = max_j Σ_i |A_ij|, ‖A‖∞ = max_i Σ_j |A_ij|, of -1 and -∞ the least."""
    written = not named and len(dim) == 2 and not isinstance(ord, str) and ord in (*_BY_VALUES, *_BY_SUMS)
    if not written:
        return torch.linalg.matrix_norm(A, ord, dim, keepdim, dtype=dtype, **named)  # type: ignore[no-any-return]
    x = (A if dtype is None else A.to(dtype)).movedim(tuple(dim), (-2, -1))
    if ord in _BY_VALUES:
        sizes, largest = torch.linalg.svdvals(x), ord > 0
    else:
        along, largest = _BY_SUMS[ord]
        sizes = torch.linalg.vector_norm(x, 1, along)
    found: Tensor = sizes.amax(-1) if largest else sizes.amin(-1)
    for d in sorted(d % A.dim() for d in dim) if keepdim else ():
        found = found.unsqueeze(d)
    return found


@at_capture(torch.linalg.norm)
def norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    """Of a matrix, or along two dims, that of matrices."""
    of_matrices = isinstance(dim, (tuple, list)) and len(dim) == 2
    if ord is None or named.keys() - {"dtype"} or not (of_matrices or (dim is None and A.dim() == 2)):
        return torch.linalg.norm(A, ord, dim, keepdim, **named)  # type: ignore[no-any-return]
    return matrix_norm(A, ord, dim if of_matrices else (-2, -1), keepdim, **named)
