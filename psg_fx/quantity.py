"""What users ask of per-sample gradients.

A quantity says which contractions of every parameter's gradient it needs (`asks`), how per-sample weights follow from
the norms (`weights`), and how its result is put together (`finish`).  It does not know how gradients are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psg_fx.errors import BadArgument
from psg_fx.network import Network, inner, weighted


@dataclass(frozen=True)
class Materialized:
    """The gradients themselves: name -> [B, *shape]."""

    key: ClassVar[str] = "grads"


@dataclass(frozen=True)
class SquaredNorm:
    """‖g_b‖² of every parameter: name -> [B]."""

    key: ClassVar[str] = "sq_norms"


@dataclass(frozen=True)
class Weighted:
    """Σ_b w_b g_b of every parameter: name -> shape.

    weights: the name of the [B] weights, "" for ones.  late: they follow from the norms.
    """

    weights: str = ""
    late: bool = False

    @property
    def key(self) -> str:
        """The name of this ask among the results."""
        return f"weighted:{self.weights}"


Ask = Materialized | SquaredNorm | Weighted


def sq_norm_pairs(terms: tuple[Network, ...]) -> list[tuple[int, int, float, Network]]:
    """‖Σ_k g_k‖² = Σ_k ‖g_k‖² + 2 Σ_{k<l} ⟨g_k, g_l⟩, each a network with out axes (b); tied parameters keep their
    cross terms.
    """
    return [
        (k, l, 1.0 if k == l else 2.0, inner(terms[k], terms[l]))
        for k in range(len(terms))
        for l in range(k, len(terms))
    ]  # fmt: skip


Results = Mapping[str, Mapping[str, torch.Tensor]]
"""Ask key -> parameter name -> tensor."""

Weights = Mapping[str, Mapping[str, torch.Tensor]]
"""Name of the weights -> parameter name -> [B]."""


@dataclass(frozen=True)
class Quantity:
    """Base of all quantities.  `field` is the field of the step's output that it fills."""

    field: ClassVar[str] = ""

    def asks(self) -> tuple[Ask, ...]:
        """What is contracted for every parameter."""
        raise NotImplementedError

    def extras(self, names: tuple[str, ...]) -> dict[str, tuple[int | None, ...]]:
        """Further inputs of the graph: name -> shape, None standing for B."""
        return {}

    def values(self, names: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `extras` for one call, from the call's keyword arguments and the quantity's own settings."""
        return {}

    def weights(self, r: Results, extras: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
        """Per-sample weights by name, each parameter -> [B], once the norms are known."""
        return {}

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        """The fields of the output."""
        raise NotImplementedError


@dataclass(frozen=True)
class Grads(Quantity):
    """Per-sample gradients: `out.grads[name]` is [B, *shape]."""

    field: ClassVar[str] = "grads"

    def asks(self) -> tuple[Ask, ...]:
        return (Materialized(),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"grads": dict(r["grads"])}


def _check_per(per: str, owner: str) -> None:
    if per not in ("model", "parameter"):
        raise BadArgument(
            f"per={per!r} is unknown", where=f"{owner}(per=...)",
            why="norms are taken over the whole model or per parameter",
            fix='per="model" or per="parameter"',
        )  # fmt: skip


def _total(sq_norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
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
        _check_per(self.per, "Norms")

    def asks(self) -> tuple[Ask, ...]:
        return (SquaredNorm(),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        root = (lambda x: x) if self.squared else torch.sqrt
        if self.per == "model":
            return {"norms": root(_total(r["sq_norms"]))}
        return {"norms": {name: root(value) for name, value in r["sq_norms"].items()}}


@dataclass(frozen=True)
class ClippedSum(Quantity):
    """Σ_b c_b g_b, the sum of private training: `out.clipped_sum[name]`, also `out.norms` and `out.clip_factors`.

    style="abadi": c = min(1, max_norm / ‖g‖) (Abadi et al. 2016, arXiv:1607.00133);
    style="automatic": c = max_norm / (‖g‖ + 0.01) (Bu et al. 2022, arXiv:2206.07136).
    max_norm: a float or 0-d tensor, read at every call; with per="parameter" it holds for each parameter, or is a
    mapping by name.
    """

    max_norm: Any
    per: str = "model"
    style: str = "abadi"
    field: ClassVar[str] = "clipped_sum"

    def __post_init__(self) -> None:
        _check_per(self.per, "ClippedSum")
        if self.style not in ("abadi", "automatic"):
            raise BadArgument(
                f"style={self.style!r} is unknown", where="ClippedSum(style=...)",
                why="it says how factors follow from norms",
                fix='style="abadi" or style="automatic"',
            )  # fmt: skip
        for value in self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]:
            _check_max_norm(value)

    def asks(self) -> tuple[Ask, ...]:
        return (SquaredNorm(), Weighted("clip", late=True))

    def extras(self, names: tuple[str, ...]) -> dict[str, tuple[int | None, ...]]:
        return {"max_norm": () if self.per == "model" else (len(names),)}

    def values(self, names: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
        if self.per == "model":
            if isinstance(self.max_norm, Mapping):
                raise _bad_max_norm(self.max_norm, 'a mapping by parameter needs per="parameter"')
            return {"max_norm": self.max_norm}
        if not isinstance(self.max_norm, Mapping):
            return {"max_norm": [self.max_norm] * len(names)}
        if set(self.max_norm) != set(names):
            odd = sorted(set(self.max_norm) ^ set(names))
            raise _bad_max_norm(self.max_norm, f"its names are not those of the parameters: {', '.join(odd[:5])}")
        return {"max_norm": [self.max_norm[name] for name in names]}

    def weights(self, r: Results, extras: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
        sq_norms, limit = r["sq_norms"], extras["max_norm"]
        if self.per == "model":
            factor = self._factor(_total(sq_norms).sqrt(), limit)
            return {"clip": dict.fromkeys(sq_norms, factor)}
        return {"clip": {n: self._factor(v.sqrt(), limit[i]) for i, (n, v) in enumerate(sq_norms.items())}}

    def _factor(self, norm: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        limit = limit.to(norm.dtype)
        if self.style == "automatic":
            return limit / (norm + 0.01)
        return torch.where(norm > limit, limit / norm, 1.0)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        norms = Norms(per=self.per).finish(r, weights, batch)
        factors = weights["clip"]
        return {
            "clipped_sum": dict(r["weighted:clip"]),
            "clip_factors": next(iter(factors.values())) if self.per == "model" else dict(factors),
            **norms,
        }


def _check_max_norm(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.ndim != 0 or not value.is_floating_point():
            raise _bad_max_norm(value, "a tensor must be a 0-d floating-point one")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise _bad_max_norm(value, "a norm's bound is a number that is not negative")


def _bad_max_norm(value: Any, why: str) -> BadArgument:
    return BadArgument(
        f"max_norm={value!r} is not a bound on norms", where="ClippedSum(max_norm=...)", why=why,
        fix='a float, a 0-d tensor, or with per="parameter" a mapping with every parameter name',
    )  # fmt: skip


@dataclass(frozen=True)
class WeightedSum(Quantity):
    """Σ_b w_b g_b with weights [B] given at the call: `step(x, y, weights=w).weighted_sum[name]`."""

    field: ClassVar[str] = "weighted_sum"

    def asks(self) -> tuple[Ask, ...]:
        return (Weighted("given"),)

    def extras(self, names: tuple[str, ...]) -> dict[str, tuple[int | None, ...]]:
        return {"weights": (None,)}

    def values(self, names: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("weights") is None:
            raise BadArgument(
                "WeightedSum needs weights", where="step(inputs, targets, weights=...)", why="it is Σ_b w_b g_b",
                fix="pass a [B] tensor: step(x, y, weights=w)",
            )  # fmt: skip
        return {"weights": given["weights"]}

    def weights(self, r: Results, extras: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
        return {"given": _Everywhere(extras["weights"])}

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"weighted_sum": dict(r["weighted:given"])}


class _Everywhere(dict[str, torch.Tensor]):
    """The same weights for every parameter."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def __missing__(self, name: str) -> torch.Tensor:
        return self.value


@dataclass(frozen=True)
class MeanGrad(Quantity):
    """The gradient of the mean of the per-sample losses: `out.mean_grad[name]`, shape of the parameter."""

    field: ClassVar[str] = "mean_grad"

    def asks(self) -> tuple[Ask, ...]:
        return (Weighted(""),)

    def finish(self, r: Results, weights: Weights, batch: int) -> dict[str, Any]:
        return {"mean_grad": {name: value / batch for name, value in r["weighted:"].items()}}


__all__ = [
    "Ask", "ClippedSum", "Grads", "Materialized", "MeanGrad", "Norms", "Quantity", "Results", "SquaredNorm",
    "Weighted", "WeightedSum", "Weights", "sq_norm_pairs", "weighted",
]  # fmt: skip
