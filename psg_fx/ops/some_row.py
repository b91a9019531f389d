"""A row that a mask picks, to stand where a sample has none: what is computed of it counts nothing, and is as finite as
what the program itself computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from psg_fx.ops.define import define_op


def _some_row(rows: Tensor, place: Tensor, fill: float) -> Tensor:
    has = place[:, 0] >= 0
    number = has.to(torch.int64).argmax()
    sample = rows.index_select(0, number[None])[0]
    row = sample.index_select(0, place[:, 0].index_select(0, number[None]).clamp(min=0))[0]
    return torch.where(has.any(), row, torch.full((), fill, dtype=rows.dtype, device=rows.device)).contiguous()


some_row = define_op(
    "some_row(Tensor rows, Tensor place, float fill) -> Tensor", _some_row,
    lambda rows, place, fill: rows.new_empty(rows.shape[2:]),
)  # fmt: skip
"""`rows` `[B, S, ..]`, of which each sample has those at `place` `[B, S]`, all -1 where it has none: one of them,
`[..]`; `fill` if no sample has any.
"""
