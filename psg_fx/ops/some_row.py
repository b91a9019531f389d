"""A row of integers that a mask picks, to stand where a sample has none: what is computed of it counts nothing, and is
an index, or a divisor, that the program itself computes with.  Not of floats, which might not be finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from psg_fx.ops.define import define_op


def _some_row(rows: Tensor, place: Tensor) -> Tensor:
    has = place[:, 0] >= 0
    number = has.to(torch.int64).argmax()
    sample = rows.index_select(0, number[None])[0]
    row = sample.index_select(0, place[:, 0].index_select(0, number[None]).clamp(min=0))[0]
    return torch.where(has.any(), row, torch.zeros((), dtype=rows.dtype, device=rows.device)).contiguous()


some_row = define_op(
    "some_row(Tensor rows, Tensor place) -> Tensor", _some_row,
    lambda rows, place: rows.new_empty(rows.shape[2:]),
)  # fmt: skip
"""`rows` `[B, S, ..]`, of which each sample has those at `place` `[B, S]`, all -1 where it has none: one of them,
`[..]`; 0 if no sample has any.
"""
