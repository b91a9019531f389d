"""Which rows stand where rows are written to places by a pointer: of those with the same place, the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from psg_fx.ops.define import define_op


def _last_rows(onto: Tensor, index: Tensor, kept: Tensor | None, dim: int) -> Tensor:
    size, along = onto.shape[dim], min(dim, index.ndim - 1)
    place = torch.where(index < 0, index + size, index)
    number = torch.arange(index.shape[along], device=index.device)
    number = number.view([-1 if d == along else 1 for d in range(index.ndim)]).expand_as(index)
    shape = [size if d == along else n for d, n in enumerate(index.shape)]
    counted = number if kept is None else torch.where(kept, number, -1)
    last = torch.full(shape, -1, device=index.device).scatter_reduce(along, place, counted, "amax")
    stands = last.gather(along, place) == number
    return (stands if kept is None else stands & kept).contiguous()


last_rows = define_op(
    "last_rows(Tensor onto, Tensor index, Tensor? kept, int dim) -> Tensor", _last_rows,
    lambda onto, index, kept, dim: index.new_empty(index.shape, dtype=torch.bool),
)  # fmt: skip
"""True for each row of `index` that is kept and behind which no kept row has its place, one of those in dim `dim` of
`onto`.  Rows lie in the same dim of `index`, or in its only one.  kept: of the shape of `index`, None: all are.
Negative places count from the end.
"""
