"""What each quantity of a row should be, from the gradients of a float64 loop over single samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from psg_fx import Dots, Projection, SecondMoment
from psg_fx.algebra.gradient import ParameterGradient
from support import oracle
from support.cases import Case

BOUND = 0.7
"""Of the median norm: some samples are clipped and some are not."""


def flat(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(len(g), -1) for g in grads.values()], 1)


def directions(grads: Mapping[str, Tensor], count: int | None) -> dict[str, Tensor]:
    """One direction for each parameter, or `count`."""
    generator = torch.Generator().manual_seed(5)
    lead = [] if count is None else [count]
    return {n: torch.randn(*lead, *g.shape[1:], generator=generator, dtype=torch.float64) for n, g in grads.items()}


def dots(truth: Truth, quantity: Dots) -> Tensor:
    chosen = directions(truth.grads, quantity.count)
    if quantity.count is None:
        return flat(truth.grads) @ torch.cat([v.flatten() for v in chosen.values()])
    return flat(truth.grads) @ flat(chosen).T


def second_moment(truth: Truth, quantity: SecondMoment) -> dict[str, Tensor]:
    shifts = {n: g.mean(0) * quantity.centered for n, g in truth.grads.items()}
    return {n: (g - shifts[n]).square().mean(0) for n, g in truth.grads.items()}


def projection(truth: Truth, quantity: Projection) -> Tensor:
    """Pᵀ g Q with the quantity's own matrices."""
    parameters = {n: ParameterGradient(n, tuple(g.shape[1:]), g.dtype, ()) for n, g in truth.grads.items()}
    matrices = {name: extra.value for name, extra in quantity.extras(parameters).items()}
    found = []
    for name, g in truth.grads.items():
        left, right = (matrices.get(f"projection.{name}.{side}") for side in "PQ")
        g = g.flatten(2) if g.ndim > 2 else g.reshape(len(g), -1)
        if left is not None:
            g = torch.einsum("bo...,op->bp...", g, left)
        found.append((g if right is None else g @ right).flatten(1))
    return torch.cat(found, 1)


PRODUCTS: dict[str, Any] = {
    "dots": dots,
    "gram": lambda truth, quantity: flat(truth.grads) @ flat(truth.grads).T,
    "second_moment": second_moment,
    "projection": projection,
}


class Truth:
    """What a row's quantities should be, computed on `device`, kept on the CPU."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        model, data = case.model().to(device), tuple(x.to(device) for x in case.data())
        losses, grads = oracle.loop_grads(model, case.loss_fn(model), data, batch_dim=case.dims)
        self.losses, self.grads = losses.cpu(), {name: g.cpu() for name, g in grads.items()}
        self.norms = oracle.norms(self.grads)
        self.own = oracle.parameter_norms(self.grads)
        self.bound = BOUND * self.norms.median().item()
        self.weights = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)

    def expected(self, field: str, quantity: Any) -> Tensor | dict[str, Tensor]:
        per = getattr(quantity, "per", "model")
        if field == "grads":
            return self.grads
        if field == "norms":
            found = dict(self.own) if per == "parameter" else {"": self.norms}
            squared = getattr(quantity, "squared", False)
            found = {n: v.square() if squared else v for n, v in found.items()}
            return found if per == "parameter" else found[""]
        if field == "mean_grad":
            return oracle.mean_grad(self.grads)
        if field == "weighted_sum":
            return oracle.weighted_sum(self.grads, self.weights)
        if field in PRODUCTS:
            return PRODUCTS[field](self, quantity)
        norms = self.own if per == "parameter" else dict.fromkeys(self.grads, self.norms)
        limit = quantity.max_norm
        bounds = limit if isinstance(limit, Mapping) else dict.fromkeys(self.grads, limit)
        factors = {
            n: bounds[n] / (v + 0.01) if quantity.style == "automatic" else oracle.clip_factors(v, float(bounds[n]))
            for n, v in norms.items()
        }
        if field == "clip_factors":
            return factors if per == "parameter" else next(iter(factors.values()))
        assert field == "clipped_sum"
        kept = self.weights if quantity.weighted else torch.ones_like(self.weights)
        return {n: oracle.weighted_sum({n: g}, factors[n] * kept)[n] for n, g in self.grads.items()}


def tolerance_of(case: Case) -> float:
    return 1e-5 if case.name == "prefix/float32-cast" else 1e-10


class Expects(Protocol):
    """What is known of a batch: the losses, and every field of every quantity."""

    losses: Any

    def expected(self, field: str, quantity: Any) -> Any:
        """The value of a field."""


def compare(out: Any, truth: Expects, quantities: list[Any], tolerance: float) -> None:
    """The losses and every field that the quantities fill."""
    assert oracle.relative_error(out.losses, truth.losses) < tolerance, "losses"
    for quantity in quantities:
        for field in [quantity.field, *["clip_factors"] * (quantity.field == "clipped_sum")]:
            got, want = getattr(out, field), truth.expected(field, quantity)
            error = oracle.worst_error(got, want) if isinstance(want, dict) else oracle.relative_error(got, want)
            assert error < tolerance, f"{field} of {quantity}: relative error {error:.2e}"
