"""What a step's answer shows of each sample's gradient, in the field that tells most of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from psg_fx.algebra.asks import direction
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.quantities.products import Dots, Gram, Projection, SecondMoment
from psg_fx.quantities.sums import Grads, MeanGrad, Norms, WeightedSum
from psg_fx.reference import definitions

ByName = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shown:
    """A field of the output with what tells each sample's gradient from others.

    of_each: name -> [B, *shape] of its value: the gradients, or of what is one of the model (a norm: [B]) with the name
    "".  of_one: the same of the gradient of one sample, without the dim of samples, from that and the further inputs of
    the graph for the batch.  is_sum: the field is one over the batch, and tells what one sample has in a batch of
    that sample alone.  what: of the gradient it is.
    """

    field: str
    of_each: Callable[[Any], ByName] = dict
    of_one: Callable[[ByName, ByName], ByName] = lambda gradient, given: gradient
    is_sum: bool = False
    what: str = "the gradient of"

    def rows(self, fields: Mapping[str, Any]) -> ByName:
        """What the fields of an answer have for each sample."""
        return self.of_each(fields[self.field])


def shown_by(quantities: Iterable[Quantity]) -> Shown | None:
    """The field that tells most, if any does."""
    asked = {type(quantity): quantity for quantity in quantities}
    shown = (make(asked[kind]) for kind, make in _MAKERS.items() if kind in asked)
    return next(filter(None, shown), None)


def _norms(quantity: Any) -> Shown:
    squared = isinstance(quantity, Norms) and quantity.squared
    of_all = quantity.per == "model"
    return Shown(Norms.field, _roots if squared else _named, _norm_of_all if of_all else _norm_of_each)


def _second_moment(quantity: Any) -> Shown | None:
    if quantity.centered:  # of a batch of one there is none
        return None
    return Shown(SecondMoment.field, lambda value: _roots(_one_row(value)), _sizes, is_sum=True)


def _weighted(gradient: ByName, given: ByName) -> ByName:
    return {name: g * given["weights"][-1].to(g) for name, g in gradient.items()}


def _along(gradient: ByName, given: ByName) -> ByName:
    return _defined(definitions.dots_check({name: given[direction(name).name] for name in gradient}), gradient, given)


def _projected(quantity: Any) -> Shown:
    check = definitions.projection_check(quantity.rank, quantity.matrix)
    of_one = partial(_defined, check)
    return Shown(Projection.field, _named, of_one, what="the projection of the gradient of")


_MAKERS: dict[type[Quantity], Callable[[Any], Shown | None]] = {
    Grads: lambda q: Shown(Grads.field),
    Norms: _norms,
    ClippedSum: _norms,  # which shows them, too
    Gram: lambda q: Shown(Gram.field, lambda value: _roots(value.diagonal()), _norm_of_all),
    MeanGrad: lambda q: Shown(MeanGrad.field, _one_row, is_sum=True),
    WeightedSum: lambda q: Shown(WeightedSum.field, _one_row, _weighted, is_sum=True, what="the weighted gradient of"),
    SecondMoment: _second_moment,
    Projection: _projected,
    Dots: lambda q: Shown(Dots.field, _named, _along, what="the inner product with directions of the gradient of"),
}
"""What is asked of the first of these counts."""


def norm(values: Iterable[Tensor]) -> float:
    """Of all together."""
    return math.hypot(*(float(torch.linalg.vector_norm(value, dtype=wide(value))) for value in values))


def wide(value: Tensor) -> torch.dtype:
    """What its numbers are compared in."""
    return torch.complex128 if value.is_complex() else torch.float64


def _named(value: Any) -> ByName:
    """What is not of each parameter has the name ""."""
    return value if isinstance(value, Mapping) else {"": value}


def _roots(squares: Any) -> ByName:
    return {name: value.clamp(min=0.0).sqrt() for name, value in _named(squares).items()}


def _one_row(value: ByName) -> ByName:
    return {name: each.unsqueeze(0) for name, each in value.items()}


def _sizes(gradient: ByName, given: ByName) -> ByName:
    return {name: g.abs() for name, g in gradient.items()}


def _norm_of_each(gradient: ByName, given: ByName) -> ByName:
    return {name: torch.tensor(norm([g]), dtype=torch.float64) for name, g in gradient.items()}


def _norm_of_all(gradient: ByName, given: ByName) -> ByName:
    return {"": torch.tensor(norm(gradient.values()), dtype=torch.float64)}


def _defined(check: definitions.Definition, gradient: ByName, given: ByName) -> ByName:
    """By the definition of a quantity that has a row for each sample."""
    wider = {name: g[None].to(wide(g)) for name, g in gradient.items()}
    found = check.expected(torch.empty(0), wider)
    return {name: value[0] for name, value in _named(found).items()}
