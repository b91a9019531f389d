"""What is not of single samples, added up over batches as its quantity says.

sum       Σ_k s_k                                    batches k of B_k samples
mean      Σ_k B_k m_k / Σ_k B_k
variance  Σ_k B_k (v_k + m_k²) / Σ_k B_k − m²        m_k, m: mean_grad of the batch, and of all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Joins
from psg_fx.step.compiled import StepOutput
from psg_fx.step.leaves import Key, leaves, nested
from psg_fx.tensors import short_name


def check_joins(joins: Joins) -> None:
    """Refuse a field of a data set that does not follow from those of its batches."""
    for field, join in joins.items():
        if join in ("cat", "sum", "mean"):
            continue
        if join == "variance":
            if "mean_grad" in joins:
                continue
            raise BadArgument(
                "the variance over a data set does not follow from those of its batches alone",
                where="over(loader, step)", why="the means of the batches differ, and are not known",
                fix="ask for MeanGrad() as well: quantities=[SecondMoment(centered=True), MeanGrad()]",
            )  # fmt: skip
        raise BadArgument(
            f"{field} of a data set does not follow from those of its batches", where="over(loader, step)",
            why="it is neither a row for every sample, nor a sum or a mean over samples",
            fix="ask for Projection(rank), whose inner products can be taken afterwards" if field == "gram"
            else "leave its quantity out, or give it joins(): a row for every sample is \"cat\"",
        )  # fmt: skip


class Totals:
    """The sums so far, in float64 (float32 on a device without it), and the number of samples."""

    def __init__(self, joins: Joins) -> None:
        self._joins = {field: join for field, join in joins.items() if join != "cat"}
        self._sums: dict[Key, torch.Tensor] = {}
        self._dtypes: dict[Key, torch.dtype] = {}
        self.count = 0

    def add(self, out: StepOutput) -> None:
        """Take in the output of one batch."""
        count = len(out.losses)
        mine = {field: value for field, value in vars(out).items() if field in self._joins}
        for key, value in leaves(mine):
            field, name = key
            join = self._joins[field]
            wide = value.to(_wide(value))
            if join == "variance":
                wide = wide + out.mean_grad[name].to(wide.dtype).square()
            if key not in self._sums:
                self._sums[key], self._dtypes[key] = torch.zeros_like(wide), value.dtype
            if count or join == "sum":  # the mean of no samples is not a number
                self._sums[key].add_(wide, alpha=1 if join == "sum" else count)
        self.count += count

    def fields(self) -> dict[str, Any]:
        """The fields over all samples, in the dtypes of the step."""
        found = dict(self._sums)
        for key, total in self._sums.items():
            if self._joins[key[0]] != "sum":
                found[key] = total / max(self.count, 1)
        for key in (key for key in found if self._joins[key[0]] == "variance"):
            mean = found["mean_grad", key[1]]
            found[key] = (found[key] - mean.square()).clamp(min=0)
        return nested({key: value.to(self._dtypes[key]) for key, value in found.items()})

    def state(self) -> dict[str, Any]:
        """What `torch.save` keeps of it."""
        dtypes = {key: short_name(dtype) for key, dtype in self._dtypes.items()}
        return {"count": self.count, "sums": dict(self._sums), "dtypes": dtypes}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a state."""
        self.count = state["count"]
        self._sums = {key: value.to(device) for key, value in state["sums"].items()}
        self._dtypes = {key: getattr(torch, name) for key, name in state["dtypes"].items()}


def _wide(value: torch.Tensor) -> torch.dtype:
    wide = torch.float32 if value.device.type == "mps" else torch.float64
    return torch.promote_types(value.dtype, wide)
