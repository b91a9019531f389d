"""What users ask of per-sample gradients.

A quantity says which contractions of every parameter's gradient it needs (`asks`), how per-sample weights follow from
the norms (`weights`), and how its result is put together (`finish`).  It does not know how gradients are computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from psg_fx.asks import Ask, Materialized, SquaredNorm, Weighted
from psg_fx.errors import BadArgument
from psg_fx.gradient import ParameterGradient

Results = Mapping[str, Mapping[str, torch.Tensor]]
"""Ask key -> parameter name -> tensor."""

FLOORS = "sq_norm_floors"
"""Beside the squared norms, for parameters whose norm is found without their gradient: what rounding errors of the
squared norm do not exceed, [B] (`psg_fx/rounding.py`)."""

Weights = Mapping[str, Mapping[str, torch.Tensor]]
"""Name of the weights -> parameter name -> [B]."""


Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> shape, in the model's order."""


Join = Literal["cat", "sum", "mean"]
"""How results of parts become that of the batch; a mean is weighted by numbers of samples."""

Joins = Mapping[str, Join]
"""Field of the output -> how it is joined."""


@dataclass(frozen=True)
class Extra:
    """A further input of the graph.

    shape: None stands for B.  dtype: None: that of bounds and weights.  value: fixed once and for all.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None = None
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Quantity:
    """Base of all quantities.

    field: of the step's output, which it fills.  reads: keyword arguments of the call that it needs.
    reads_each: those of them that have an entry for every sample.
    """

    field: ClassVar[str] = ""
    reads: ClassVar[tuple[str, ...]] = ()
    reads_each: ClassVar[tuple[str, ...]] = ()

    def resolved(self, shapes: Shapes, given: Mapping[str, Any]) -> Quantity:
        """The quantity with everything that this call's keyword arguments fix about the graph."""
        return self

    @property
    def variant(self) -> Hashable:
        """What tells the graph of a resolved quantity from those of other calls."""
        return None

    def asks(self) -> tuple[Ask, ...]:
        """What is contracted for every parameter."""
        raise NotImplementedError

    def extras(self, gradients: Mapping[str, ParameterGradient]) -> dict[str, Extra]:
        """Further inputs of the graph by name."""
        return {}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `extras` for one call, from the call's keyword arguments and the quantity's own settings."""
        return {}

    def weights(self, r: Results, extras: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
        """Per-sample weights by name, each parameter -> [B], once the norms are known."""
        return {}

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        """The fields of the output."""
        raise NotImplementedError

    def joins(self) -> Joins:
        """How each of these fields follows from those of the batch's parts; empty where it does not."""
        return {}


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


def check_choice(owner: str, name: str, value: str, known: tuple[str, ...], why: str) -> None:
    """Refuse an argument that is none of the known words."""
    if value not in known:
        raise BadArgument(
            f"{name}={value!r} is unknown", where=f"{owner}({name}=...)", why=why,
            fix=" or ".join(f'{name}="{word}"' for word in known),
        )  # fmt: skip


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
        return {"given": _Everywhere(extras["weights"])}

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"weighted_sum": dict(r["weighted:given"])}

    def joins(self) -> Joins:
        return {"weighted_sum": "sum"}


class _Everywhere(dict[str, torch.Tensor]):
    """The same weights for every parameter."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def __missing__(self, name: str) -> torch.Tensor:
        return self.value


@dataclass(frozen=True)
class MeanGrad(Quantity):
    """The gradient of the mean of the per-sample losses: `out.mean_grad[name]`, shape of the parameter.

    That is `p.grad` of a loss that is a mean over samples.  A loss that divides by something else (`ignore_index`,
    weights of classes, tokens that are not padding) divides by that of each sample here, and by that of the batch in
    `p.grad`: a loss with `reduction="sum"` and `WeightedSum`, with one over the batch's divisor as every weight, is
    `p.grad` there.
    """

    field: ClassVar[str] = "mean_grad"

    def asks(self) -> tuple[Ask, ...]:
        return (Weighted(""),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"mean_grad": {name: value / batch for name, value in r["weighted:"].items()}}

    def joins(self) -> Joins:
        return {"mean_grad": "mean"}
