"""Systems of equations whose matrix and right sides have other numbers of dims, written with as many in both.

    A [n, n] shared, X [.., n, k]:   solve(A, X) = the columns of solve(A, [n, .. k])        one factorization
    otherwise:                       both with the leading dims of the other, by expand

A right side that is a vector is a matrix of one column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psg_fx.op_table import at_capture


@at_capture(torch.linalg.solve)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """X with A X = B, or X A = B."""
    if left and (B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])):
        return _solved(torch.linalg.solve, A, B.unsqueeze(-1)).squeeze(-1)
    return _solved(lambda a, b: torch.linalg.solve(a, b, left=left), A, B, left)


@at_capture(torch.linalg.solve_triangular)
def solve_triangular(A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """X with A X = B, or X A = B, for a triangular A."""
    how: dict[str, Any] = {"upper": upper, "left": left, "unitriangular": unitriangular}
    return _solved(lambda a, b: torch.linalg.solve_triangular(a, b, **how), A, B, left)


@at_capture(torch.cholesky_solve, Tensor.cholesky_solve)
def cholesky_solve(B: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    """X with L Lᵀ X = B (upper: Lᵀ L X = B)."""
    return _solved(lambda a, b: torch.cholesky_solve(b, a, upper), L, B)


@at_capture(torch.linalg.lu_solve)
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """X with P L U X = B, or X P L U = B; adjoint: of the conjugate transpose of P L U."""
    if LU.dim() != B.dim() and (LU.dim() > 2 or not left):
        leading = torch.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
        LU, pivots = LU.expand(*leading, *LU.shape[-2:]), pivots.expand(*leading, *pivots.shape[-1:])
    return _solved(lambda a, b: torch.linalg.lu_solve(a, pivots, b, left=left, adjoint=adjoint), LU, B, left)


def _solved(solver: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, left: bool = True) -> Tensor:
    if a.dim() == b.dim():
        return solver(a, b)
    if a.dim() == 2 and left:
        columns = b.movedim(-2, 0)
        solved = solver(a, columns.flatten(1))
        return solved.reshape(columns.shape).movedim(0, -2)
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return solver(a.expand(*leading, *a.shape[-2:]), b.expand(*leading, *b.shape[-2:]))
