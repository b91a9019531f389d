"""What each quantity should be, from per-sample gradients in float64: one plain formula per quantity.

The formulas are written from the definitions, not from the compiler's own code: they are what it is held against, so
none of them is shared with it, not even where it has the same one (norms, factors, projections).  A projection takes
only its random matrices from the quantity: another draw would be another question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ByName = Mapping[str, Tensor]
Answer = Tensor | ByName


@dataclass(frozen=True)
class Definition:
    """One field of a step's output and how to compute it from losses `[B]` and gradients `name -> [B, *shape]`.

    of_samples: it is one of samples also where the others are of groups of samples.
    """

    field: str
    expected: Callable[[Tensor, ByName], Answer]
    per_sample: bool = True
    of_samples: bool = False


LOSSES = Definition("losses", lambda losses, grads: losses, of_samples=True)
GRADS = Definition("grads", lambda losses, grads: grads)
MEAN_GRAD = Definition(
    "mean_grad", lambda losses, grads: {n: g.mean(0) for n, g in grads.items()}, per_sample=False, of_samples=True
)
GRAM = Definition("gram", lambda losses, grads: (flat := flattened(grads)) @ flat.T)


def of_groups(grads: ByName, groups: Any, count: int | None) -> ByName:
    """The sum of the gradients of each group's samples, `[G, *shape]`; a sample of group -1 is in none."""
    ids = torch.as_tensor(groups).cpu()
    total = int(ids.max()) + 1 if count is None and len(ids) else count or 0
    found = {}
    for name, g in grads.items():
        rows = [g[(ids == u).to(g.device)].sum(0) for u in range(total)]
        found[name] = torch.stack(rows) if rows else g[:0]
    return found


def in_rows(g: Tensor) -> Tensor:
    """A gradient in a row for each sample, of which there may be none."""
    return g.reshape(len(g), math.prod(g.shape[1:]))


def flattened(grads: ByName) -> Tensor:
    """All parameters side by side, `[B, P]`."""
    return torch.cat([*map(in_rows, grads.values())], dim=1)


def norms_of(grads: ByName, per: str) -> ByName:
    """For each parameter the 2-norm `[B]` of its own gradient, or with per="model" of the whole."""
    own = {name: in_rows(g).norm(dim=1) for name, g in grads.items()}
    return own if per == "parameter" else dict.fromkeys(grads, flattened(grads).norm(dim=1))


def _any(values: ByName) -> Tensor:
    return next(iter(values.values()))


def norms_check(*, per: str = "model", squared: bool = False) -> Definition:
    """`Norms(per, squared)`: `[B]`, or `name -> [B]`."""

    def expected(losses: Tensor, grads: ByName) -> Answer:
        found = {name: n.square() if squared else n for name, n in norms_of(grads, per).items()}
        return found if per == "parameter" else _any(found)

    return Definition("norms", expected)


def clip_factors_of(grads: ByName, max_norm: Any, per: str, style: str) -> ByName:
    """cᵢ for each parameter, `[B]`: min(1, max_norm/‖gᵢ‖), or max_norm/(‖gᵢ‖ + 0.01) in the automatic style; 0 where a
    norm of the sample is not finite.
    """
    factors, norms = {}, norms_of(grads, per)
    finite = torch.stack([norm.isfinite() for norm in norms.values()]).all(0)
    for name, norm in norms.items():
        value = max_norm[name] if isinstance(max_norm, Mapping) else max_norm
        number = value if isinstance(value, Tensor) else float(value)
        limit = torch.as_tensor(number, dtype=norm.dtype, device=norm.device)
        if style == "automatic":
            factors[name] = limit / (norm + 0.01)
        else:
            factors[name] = torch.where(norm > limit, limit / norm, (limit > 0).to(norm))
        factors[name] = factors[name].where(finite, 0.0)
    return factors


def clip_factors_check(max_norm: Any, *, per: str = "model", style: str = "abadi") -> Definition:
    """The factors of `ClippedSum`: `[B]`, or `name -> [B]`."""

    def expected(losses: Tensor, grads: ByName) -> Answer:
        factors = clip_factors_of(grads, max_norm, per, style)
        return factors if per == "parameter" else _any(factors)

    return Definition("clip_factors", expected)


def clipped_sum_check(
    max_norm: Any, *, per: str = "model", style: str = "abadi", weights: Tensor | None = None
) -> Definition:
    """`ClippedSum(max_norm, per, style)`: Σᵢ wᵢ cᵢ gᵢ, `name -> shape`; without weights `[B]` they are 1."""

    def expected(losses: Tensor, grads: ByName) -> Answer:
        factors = clip_factors_of(grads, max_norm, per, style)
        kept = {name: factor > 0 for name, factor in factors.items()}  # 0·NaN is NaN
        if weights is not None:
            factors = {name: factor * weights.to(factor) for name, factor in factors.items()}
        return {n: torch.tensordot(factors[n][kept[n]], g[kept[n]], dims=([0], [0])) for n, g in grads.items()}

    return Definition("clipped_sum", expected, per_sample=False)


def weighted_sum_check(weights: Tensor) -> Definition:
    """`WeightedSum()` for weights `[B]`: Σᵢ wᵢ gᵢ, `name -> shape`."""

    def expected(losses: Tensor, grads: ByName) -> Answer:
        return {name: torch.tensordot(weights.to(g), g, dims=([0], [0])) for name, g in grads.items()}

    return Definition("weighted_sum", expected, per_sample=False)


def dots_check(directions: ByName) -> Definition:
    """`Dots()` for directions `name -> shape` or `[K, *shape]`: ⟨gᵢ, v⟩, `[B]` or `[B, K]`."""

    def expected(losses: Tensor, grads: ByName) -> Answer:
        several = all(directions[name].dim() == g.dim() for name, g in grads.items())
        rows = [directions[n].to(g).reshape(len(directions[n]) if several else 1, -1) for n, g in grads.items()]
        found = flattened(grads) @ torch.cat(rows, dim=1).T
        return found if several else found[:, 0]

    return Definition("dots", expected)


def second_moment_check(*, centered: bool = False) -> Definition:
    """`SecondMoment(centered)`: Σᵢ gᵢ² / B, or Σᵢ (gᵢ - ḡ)² / B, `name -> shape`."""

    def expected(losses: Tensor, grads: ByName) -> Answer:
        meant = {n: g - g.mean(0) if centered else g for n, g in grads.items()}
        return {n: g.square().sum(0) / max(len(g), 1) for n, g in meant.items()}  # 0 of no groups

    return Definition("second_moment", expected, per_sample=False)


def projection_check(rank: int, matrix: Callable[[str, str, int], Tensor]) -> Definition:
    """`Projection(rank)`: Pᵀ gᵢ Q of every matrix, Pᵀ gᵢ of every vector, side by side, `[B, k]`; P, Q by `matrix`.

    A side of at most `rank` elements is kept as it is.
    """

    def expected(losses: Tensor, grads: ByName) -> Answer:
        found = []
        for name, g in grads.items():
            kept = g.flatten(2) if g.dim() > 2 else in_rows(g)
            for dim, side in zip(range(1, kept.dim()), "PQ", strict=False):
                if kept.shape[dim] > rank:
                    columns = matrix(name, side, kept.shape[dim]).to(kept)
                    kept = torch.tensordot(kept, columns, ([dim], [0])).movedim(-1, dim)
            found.append(kept.flatten(1))
        return torch.cat(found, 1)

    return Definition("projection", expected)


_MAKERS: dict[str, Callable[[Any, Mapping[str, Any]], list[Definition]]] = {
    "grads": lambda q, given: [GRADS],
    "norms": lambda q, given: [norms_check(per=q.per, squared=q.squared)],
    "clipped_sum": lambda q, given: [
        norms_check(per=q.per),
        clip_factors_check(q.max_norm, per=q.per, style=q.style),
        clipped_sum_check(q.max_norm, per=q.per, style=q.style, weights=given["weights"] if q.weighted else None),
    ],
    "weighted_sum": lambda q, given: [weighted_sum_check(given["weights"])],
    "mean_grad": lambda q, given: [MEAN_GRAD],
    "dots": lambda q, given: [dots_check(given["directions"])],
    "gram": lambda q, given: [GRAM],
    "second_moment": lambda q, given: [second_moment_check(centered=q.centered)],
    "projection": lambda q, given: [projection_check(q.rank, q.matrix)],
}
"""Field of a quantity -> its checks, from its settings and the keyword arguments of the call."""


def definitions_for(
    quantities: Iterable[Any], given: Mapping[str, Any] | None = None
) -> tuple[list[Definition], list[str]]:
    """The checks of the losses and of `quantities`, and a note for each quantity that has none.

    `given`: what the call passed beside inputs and targets (`weights`, `directions`). Where two quantities fill one
    field, the one that is asked for it is checked: `Norms` before the norms of a `ClippedSum`.
    """
    checks = {LOSSES.field: LOSSES}
    notes = []
    for q in quantities:
        make = _MAKERS.get(q.field)
        if make is None:
            notes.append(f"not checked: {q.field} has no formula to hold it against")
            continue
        for check in make(q, given or {}):
            if check.field == q.field or check.field not in checks:
                checks[check.field] = check
    return list(checks.values()), notes
