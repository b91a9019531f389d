"""`psg_fx::added_rows`: rows added up by number, in one op that a compiler does not take apart.

Inductor fills the zeros that rows are added to in its first kernel, since they wait for nothing: the gradient of an
embedding would be in memory for the whole step.
"""

from __future__ import annotations

from torch import Tensor

from psg_fx.ops.define import define_op


def _added_rows(ids: Tensor, rows: Tensor, count: int) -> Tensor:
    index = ids.reshape(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
    return rows.new_zeros((count, *rows.shape[1:])).scatter_add_(0, index, rows)


added_rows = define_op(
    "added_rows(Tensor ids, Tensor rows, SymInt count) -> Tensor", _added_rows,
    lambda ids, rows, count: rows.new_empty((count, *rows.shape[1:])),
)  # fmt: skip
"""found[k] = Σ_{r: ids[r] = k} rows[r] for k < count; ids: int64, one for each row."""
