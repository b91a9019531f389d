"""Sparse matrices that a model holds: graphs of users and items, adjacencies, Laplacians.

A graph of a capture has dense tensors.  A sparse matrix that the code holds, or makes of what it holds, is computed
with as it is; where it meets what is captured, as the left factor of a product, that is written with its entries:

    (A x)[r] = Σ over entries (r, c, v) of A:  v · x[c]

They are constants of the graph: a step looks at every call whether the tensors that they were made of are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from psg_fx.errors import NotYetSupported
from psg_fx.graph import facts
from psg_fx.program.code import users_line
from psg_fx.program.decisions.questions import entries
from psg_fx.torch_private.modes import no_modes, without_functions


def sparse(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Tensor], Callable[[], Any]] | None:
    """A function of sparse tensors, or one that makes them: those whose numbers a graph of it holds, and what computes
    it.  None for any other function.

    Raises:
        NotYetSupported: where they follow what a graph computes, or are no left factor of a product with it.
    """
    given = list(facts.tensors((*args, *kwargs.values())))
    name = getattr(func, "__name__", str(func))
    if name not in _MAKE and not any(map(_is_sparse, given)):
        return None
    parts = name in ("indices", "values")
    if name in _OF_ONE and all(map(_is_fixed, given)) and not (parts and args[0].layout is not torch.sparse_coo):
        if parts and _outside(Tensor.is_coalesced, args, {}):
            return given, lambda: _outside(entries, args, kwargs)[name == "values"]  # no views of a sparse one
        return given, lambda: _outside(func, args, kwargs)
    if name in _PRODUCTS and len(args) == 2 and not kwargs and _is_product(*args):
        return args[:1], lambda: _product(*args)
    of = "what the graph computes" if name in _MAKE else "a sparse tensor"
    raise NotYetSupported(
        f"{name} of {of}", where=users_line(sys._getframe(2)),
        why="a graph has dense tensors; a fixed sparse matrix is known as the left factor of a product, A @ x",
        fix="write it with such products, or with gather and index_add over A.coalesce().indices() and .values(); or "
        "make A dense: A.to_dense()",
    )  # fmt: skip


def _is_product(matrix: Tensor, x: Tensor) -> bool:
    """Whether torch multiplies them, too."""
    fits = _is_fixed(matrix) and matrix.dim() == 2 and matrix.layout in (torch.sparse_coo, torch.sparse_csr)
    return (
        fits and not _is_sparse(x) and x.dim() in (1, 2) and x.dtype == matrix.dtype and x.is_floating_point()
        and bool(x.shape[0] == matrix.shape[1])
    )  # fmt: skip


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """`[m, n]` by `[n]` or `[n, d]`."""
    (rows, columns), values = _outside(entries, (matrix,), {})
    taken = values.view(-1, *[1] * (x.dim() - 1)) * x[columns]
    return x.new_zeros(matrix.shape[0], *x.shape[1:]).index_add(0, rows, taken)


def _outside(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What it gives where nothing is captured."""
    with no_modes(), without_functions():
        return func(*args, **kwargs)


def _is_sparse(value: Tensor) -> bool:
    """Whether it is sparse, and none of a capture's own."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is not torch.strided


def _is_fixed(value: Tensor) -> bool:
    """Whether it is the code's own, and not learned."""
    return type(value) in (Tensor, nn.Parameter) and not value.requires_grad


_MAKE = frozenset({"sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor"})
_PRODUCTS = frozenset({"mm", "_sparse_mm", "spmm", "matmul", "__matmul__", "mv"})
_OF_ONE = _MAKE | {
    "__get__", "size", "dim", "stride", "numel", "_nnz", "is_coalesced", "is_floating_point", "clone", "coalesce",
    "indices", "_indices", "values", "_values", "to_dense", "to_sparse", "to_sparse_coo", "cpu",
    "to_sparse_csr", "t", "transpose", "detach", "to", "float", "double", "mul", "div", "__mul__",
    "__rmul__", "__truediv__", "neg", "add", "sub", "__add__", "__sub__", "sum", "_sparse_sum",
    "__len__", "type", "pow", "abs", "sqrt", "element_size",
}  # fmt: skip
"""Functions without a draw or a write: computed at capture where all that they are given is fixed."""
