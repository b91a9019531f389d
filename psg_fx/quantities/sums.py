"""Gradients, their norms, and their sums: what most users ask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.asks import Materialized, SquaredNorm, Weighted
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Extra, Joins, Quantity, Results, Shapes, Weights, check_choice, check_flag


@dataclass(frozen=True)
class Grads(Quantity):
    """Per-sample gradients: `out.grads[name]` is [B, *shape]."""

    field: ClassVar[str] = "grads"

    def asks(self) -> tuple[Ask, ...]:
        return (Materialized(),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"grads": dict(r["grads"])}

    def joins(self) -> Joins:
        return {"grads": "cat"}


def check_per(per: str, owner: str) -> None:
    """Refuse what is neither "model" nor "parameter"."""
    check_choice(owner, "per", per, ("model", "parameter"), "norms are taken over the whole model or per parameter")


def total(sq_norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """‖g_b‖² over all parameters, [B]."""
    return torch.stack(list(sq_norms.values())).sum(0)


@dataclass(frozen=True)
class Norms(Quantity):
    """2-norms of the per-sample gradients: `out.norms` is [B] (per="model"), or name -> [B] (per="parameter").

    Accumulated in float32 or better; `squared=True` leaves the root out.
    """

    per: str = "model"
    squared: bool = False
    field: ClassVar[str] = "norms"

    def __post_init__(self) -> None:
        check_per(self.per, "Norms")
        check_flag("Norms", "squared", self.squared)

    def asks(self) -> tuple[Ask, ...]:
        return (SquaredNorm(),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        root = (lambda x: x) if self.squared else torch.sqrt
        if self.per == "model":
            return {"norms": root(total(r["sq_norms"]))}
        return {"norms": {name: root(value) for name, value in r["sq_norms"].items()}}

    def joins(self) -> Joins:
        return {"norms": "cat"}


def given_weights(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a call."""
    if given.get("weights") is None:
        raise BadArgument(
            f"{owner} needs weights", where="step(inputs, targets, weights=...)", why="it is Σ_b w_b g_b",
            fix="pass a [B] tensor: step(x, y, weights=w)",
        )  # fmt: skip
    return {"weights": given["weights"]}


@dataclass(frozen=True)
class WeightedSum(Quantity):
    """Σ_b w_b g_b with weights [B] given at the call: `step(x, y, weights=w).weighted_sum[name]`."""

    field: ClassVar[str] = "weighted_sum"
    reads: ClassVar[tuple[str, ...]] = ("weights",)
    reads_each: ClassVar[tuple[str, ...]] = ("weights",)

    def asks(self) -> tuple[Ask, ...]:
        return (Weighted("given"),)

    def extras(self, gradients: Mapping[str, ParameterGradient]) -> dict[str, Extra]:
        return {"weights": Extra((None,))}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        return given_weights("WeightedSum", given)

    def weights(self, r: Results, extras: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
        return {"given": defaultdict(lambda: extras["weights"])}  # the same for every parameter

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"weighted_sum": dict(r["weighted:given"])}

    def joins(self) -> Joins:
        return {"weighted_sum": "sum"}


@dataclass(frozen=True)
class MeanGrad(Quantity):
    """The gradient of the mean of the per-sample losses: `out.mean_grad[name]`, shape of the parameter.

    That is `p.grad` of a loss that is a mean over samples.  A loss that divides by something else (`ignore_index`,
    weights of classes, tokens that are not padding) divides by that of each sample here, and by that of the batch in
    `p.grad`: a loss with `reduction="sum"` and `WeightedSum`, with one over the batch's divisor as every weight, is
    `p.grad` there.  The sum over the samples comes first, and has to be in the range of the dtype in which it is taken:
    that of the parameters, or of autocast.  Where B times the mean is not (a loss that a `GradScaler` has scaled up for
    float16), `WeightedSum` with weights 1/B is.
    """

    field: ClassVar[str] = "mean_grad"
    over_samples: ClassVar[bool] = True

    def asks(self) -> tuple[Ask, ...]:
        return (Weighted(samples=True),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"mean_grad": {name: value / batch for name, value in r["samples"].items()}}

    def joins(self) -> Joins:
        return {"mean_grad": "mean"}
