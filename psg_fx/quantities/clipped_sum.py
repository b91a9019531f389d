"""`ClippedSum`: the sum of private training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from numbers import Real
from typing import Any, ClassVar

import torch

from psg_fx.algebra.ask import Ask
from psg_fx.algebra.asks import FLOORS, InFull, SquaredNorm, Weighted
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.errors import BadArgument
from psg_fx.quantities.base import Extra, Joins, Quantity, Results, Shapes, Weights, check_choice, check_flag
from psg_fx.quantities.sums import Norms, check_per, given_weights, total

COUNTED = "counted"
"""A further input of graphs with a clipped sum, [B]: how often each sample counts, 1 or 0."""


@dataclass(frozen=True)
class ClippedSum(Quantity):
    """Σ_b c_b g_b, the sum of private training: `out.clipped_sum[name]`, also `out.norms` and `out.clip_factors`.

    style="abadi": c = min(1, max_norm / ‖g‖) (Abadi et al. 2016, arXiv:1607.00133);
    style="automatic": c = max_norm / (‖g‖ + 0.01) (Bu et al. 2022, arXiv:2206.07136).
    max_norm: a number or 0-d tensor, read at every call; with per="parameter" it holds for each parameter, or is a
    mapping by name.  A negative one is refused; on CUDA, where to look at its value would be a synchronisation, factors
    and sum are NaN instead.
    Where ‖g‖ comes from Gram matrices, c does not take it for smaller than rounding lets one know: a part of the sum is
    at most √2 max_norm, also where the gradients of a sample's positions cancel (`psg_fx/planner/rounding.py`).
    weighted: the sum is Σ_b w_b c_b g_b with weights [B] given at the call, so that a 0 masks a padded sample:
    `step(x, y, weights=mask)`.
    nonfinite: "drop": a sample whose norm is NaN or inf (of per="parameter": one of its norms) has factor 0, of all
    parameters, and no part in the sum, whatever its weight is.  `out.norms` shows which samples these are.  On CUDA all
    that is multiplied for the sum has zeros in their places, and nothing waits; on a CPU, and on CUDA where samples are
    groups or rows or go to experts, the step looks at the norms (a synchronisation), and computes the sum by a second
    run over the other samples, in which dropout draws what it drew.
    "keep": the sum is what arithmetic makes of it, mostly NaN.
    in_float32: the sum of gradients of half precision is formed and returned in float32.  Else it is rounded to their
    dtype, by which one sample may change it by several times max_norm (docs/private.md).
    """

    max_norm: Any
    per: str = "model"
    style: str = "abadi"
    weighted: bool = False
    nonfinite: str = "drop"
    in_float32: bool = False
    field: ClassVar[str] = "clipped_sum"

    @property
    def leaves_out(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("clip",) if self.nonfinite == "drop" else ()

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("weights",) if self.weighted else ()

    @property
    def reads_each(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.reads

    def __post_init__(self) -> None:
        check_per(self.per, "ClippedSum")
        why = "it says how factors follow from norms"
        check_choice("ClippedSum", "style", self.style, ("abadi", "automatic"), why)
        why = "it says what becomes of samples whose norm is NaN or inf"
        check_choice("ClippedSum", "nonfinite", self.nonfinite, ("drop", "keep"), why)
        check_flag("ClippedSum", "weighted", self.weighted)
        check_flag("ClippedSum", "in_float32", self.in_float32)
        for value in self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]:
            _as_bound(value, self.style)

    def asks(self) -> tuple[Ask, ...]:
        return (SquaredNorm(), (InFull if self.in_float32 else Weighted)("clip", after_norms=True))

    def extras(self, gradients: Mapping[str, ParameterGradient]) -> dict[str, Extra]:
        found = {"max_norm": Extra(() if self.per == "model" else (len(gradients),))}
        scales = [COUNTED] * (self.nonfinite == "drop") + ["weights"] * self.weighted
        return found | {name: Extra((None,)) for name in scales}

    def values(self, shapes: Shapes, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"max_norm": self._bounds(shapes)} | (given_weights("ClippedSum", given) if self.weighted else {})

    def _bounds(self, shapes: Shapes) -> Any:
        if isinstance(self.max_norm, (float, int)) and self.per == "model":
            return float(self.max_norm)  # looked at when the quantity was made
        return bounds_of(self.max_norm, None if self.per == "model" else list(shapes), self.style)

    def weights(self, r: Results, extras: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
        sq_norms, floors, limit = r["sq_norms"], r[FLOORS], extras["max_norm"]
        whole = self.per == "model"
        if whole:  # as if it were one parameter
            sq_norms, floors = {"": total(sq_norms)}, {"": total(floors)} if floors else {}
        finite = reduce(torch.logical_and, (each < math.inf for each in sq_norms.values())) if self.leaves_out else None
        norms = {name: _at_least(value, floors.get(name)).sqrt() for name, value in sq_norms.items()}
        bounds = (limit if whole else limit[i] for i in range(len(norms)))
        pairs = zip(norms.items(), bounds, strict=True)
        factors = {name: self._factor(norm, bound, finite) for (name, norm), bound in pairs}
        clip = {name: self._scaled(factor, extras) for name, factor in factors.items()}
        if whole:
            factors, clip = (dict.fromkeys(r["sq_norms"], found[""]) for found in (factors, clip))
        return {"factors": factors, "clip": clip}

    def _scaled(self, factor: torch.Tensor, extras: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What multiplies the gradients; 0 for a sample that is dropped, whatever its weight is."""
        dropped = self.nonfinite == "drop"
        counted = factor * extras[COUNTED].to(factor.dtype) if dropped else factor
        if not self.weighted:
            return counted
        found = counted * extras["weights"].to(factor.dtype)
        return torch.where(counted == 0, 0.0, found) if dropped else found

    def _factor(self, norm: torch.Tensor, limit: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor:
        limit = limit.to(norm.dtype)
        if self.style == "automatic":
            found = limit / (norm + 0.01)
        else:
            found = torch.where(norm > limit, limit / norm, (limit > 0).to(norm.dtype))
        if finite is not None:
            found = torch.where(finite, found, 0.0)
        return torch.where(limit >= 0, found, math.nan)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        norms = Norms(per=self.per).finish(r, weights, batch)
        factors = weights["factors"]
        return {
            "clipped_sum": dict(r["weighted:clip"]),
            "clip_factors": next(iter(factors.values())) if self.per == "model" else dict(factors),
            **norms,
        }

    def joins(self) -> Joins:
        return {"clipped_sum": "sum", "clip_factors": "cat", "norms": "cat"}


def weights_of_clipped(quantities: Iterable[Quantity]) -> frozenset[str]:
    """The weights whose zeros leave samples out of clipped sums: those whose gradient is not finite."""
    return frozenset(name for q in quantities if isinstance(q, ClippedSum) for name in q.leaves_out)


def _at_least(sq_norm: torch.Tensor, lowest: torch.Tensor | None) -> torch.Tensor:
    """The squared norm, not taken for less than what it may be; NaN stays NaN."""
    if lowest is None:
        return sq_norm
    return torch.where(lowest > sq_norm, lowest.to(sq_norm.dtype), sq_norm)


def bounds_of(max_norm: Any, names: Sequence[str] | None, style: str = "abadi") -> Any:
    """The bound that a graph reads, or those of all the parameters named.  Raises BadArgument; on another device than
    the CPU a tensor is not looked into.
    """
    if not isinstance(max_norm, Mapping):
        bound = _as_bound(max_norm, style)
        return bound if names is None else [bound] * len(names)
    if names is None:
        raise _bad_max_norm(max_norm, 'a mapping by parameter needs per="parameter"')
    if odd := sorted(map(str, set(max_norm) ^ set(names))):
        raise _bad_max_norm(max_norm, f"its names are not those of the parameters: {', '.join(odd[:5])}")
    return [_as_bound(max_norm[name], style) for name in names]


_LARGEST = 0.01 * torch.finfo(torch.float32).max
"""Of bounds that are divided by the norm + 0.01."""


def _as_bound(value: Any, style: str) -> torch.Tensor | float:
    """The value, as a float if it is a number."""
    number = value
    if isinstance(value, torch.Tensor):
        if value.ndim != 0 or not value.is_floating_point():
            raise _bad_max_norm(value, "a tensor must be a 0-d floating-point one")
        if value.device.type != "cpu":
            return value
        number = value.item()
    bound = _as_float(number)
    if not bound >= 0:
        raise _bad_max_norm(number, "a norm's bound is a number that is not negative")
    if style == "automatic" and bound > _LARGEST:
        raise _bad_max_norm(number, 'style="automatic" divides it by the norm, so all factors would be infinite')
    return value if isinstance(value, torch.Tensor) else bound


def _as_float(value: Any) -> float:
    """The number, NaN for what is none or larger than any float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _bad_max_norm(value: Any, why: str) -> BadArgument:
    return BadArgument(
        f"max_norm={value!r} is not a bound on norms", where="ClippedSum(max_norm=...)", why=why,
        fix='a float, a 0-d tensor, or with per="parameter" a mapping with every parameter name',
    )  # fmt: skip
