"""`F.embedding_bag` as lookups and sums: torch's own gives its op the place of every bag in the flat batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx.errors import NotYetSupported
from psg_fx.op_table import at_capture

_WITH_ROWS = ContextVar("_WITH_ROWS", default=False)


@contextlib.contextmanager
def bags_of_rows(rows: bool) -> Iterator[None]:
    """rows: whether bags may be given by where they begin, since some inputs hold rows of samples."""
    before = _WITH_ROWS.set(rows)
    try:
        yield
    finally:
        _WITH_ROWS.reset(before)


@at_capture(F.embedding_bag)
def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """y[b,:] = Σ_t w[b,t] W[ids[b,t],:] (sum), Σ_t W[ids[b,t],:] / T (mean), or the largest for each feature (max).

    For ids `[B, T]`; or in calls with rows for ids `[R]` and offsets, bags of any length.  Ids equal to padding_idx
    do not count; an empty bag is zero.
    """
    flat = input.dim() == 1 and offsets is not None and _WITH_ROWS.get()
    if not (flat or (input.dim() == 2 and offsets is None)) or max_norm or mode not in ("sum", "mean", "max"):
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    if scale_grad_by_freq:
        raise NotYetSupported(
            "embedding_bag with scale_grad_by_freq", where="F.embedding_bag",
            why="torch divides some of its gradients by the frequency of another token than theirs",
            fix="use nn.Embedding(scale_grad_by_freq=True) and a sum over the tokens",
        )  # fmt: skip
    rows = F.embedding(input, weight, padding_idx, sparse=sparse)
    if per_sample_weights is not None:
        if mode != "sum":
            raise NotImplementedError(f"embedding_bag: per_sample_weights goes with mode='sum', not {mode!r}")
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is not None:
        starts = (offsets[:-1] if include_last_offset else offsets).to(torch.int64).contiguous()
        kept = None if padding_idx is None else input != padding_idx % weight.shape[0]
        return _bags(rows, kept, starts, mode)
    if input.shape[1] == 0:
        return rows.sum(1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values
    kept = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        largest = torch.where(kept, rows, float("-inf")).max(1).values
        return torch.where(kept.any(1), largest, 0.0)
    total = torch.where(kept, rows, 0.0).sum(1)
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def _bags(rows: Tensor, kept: Tensor | None, starts: Tensor, mode: str) -> Tensor:
    """The rows of each bag, `[R, D]` -> `[B, D]`, those that are kept: their sum, mean, or largest for each feature."""
    bag = torch.searchsorted(starts, torch.arange(rows.shape[0], device=rows.device), right=True) - 1
    total = rows.new_zeros(starts.shape[0], rows.shape[1])
    if kept is not None:
        rows = torch.where(kept.unsqueeze(-1), rows, -math.inf if mode == "max" else 0.0)
    if mode == "sum":
        return total.index_add(0, bag, rows)
    counts = rows.new_zeros(starts.shape[0])
    ones = rows.new_ones(rows.shape[0]) if kept is None else kept.to(rows.dtype)
    counts = counts.index_add(0, bag, ones).unsqueeze(-1)
    if mode == "mean":
        return total.index_add(0, bag, rows) / counts.clamp(min=1)
    largest = total.scatter_reduce(0, bag.unsqueeze(-1).expand(-1, rows.shape[1]), rows, "amax", include_self=False)
    return torch.where(counts > 0, largest, 0.0)
