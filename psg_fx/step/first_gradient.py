"""The gradient of one sample by autograd through the user's own code, beside what a step's first answer shows of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from psg_fx.graph import facts
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.clipped_sum import ClippedSum
from psg_fx.quantities.products import Gram, SecondMoment
from psg_fx.quantities.sums import Grads, MeanGrad, Norms
from psg_fx.step.binding import Binding
from psg_fx.torch_private.onednn import may_round

_TIMES = 10.0
"""How many times as far as rounding moves it the gradient may lie apart: sums in another order round more often."""
_WAYS = 4
"""How many times rounding is tried: a squared norm that is lost in it is 0 as often as not."""
_OF_CUDA = 2.0**-11
"""What float32 may be rounded to in products on CUDA."""


@dataclass(frozen=True)
class Shown:
    """A field of the output with what tells each sample's gradient from others.

    of_each: name -> [B, *shape] of its value: the gradients, or of norms [B], that of the model with the name "".
    of_one: the same of the gradient of one sample, without the dim of samples.
    is_sum: the field is one over the batch, and tells what one sample has in a batch of that sample alone.
    """

    field: str
    of_each: Callable[[Any], Mapping[str, Tensor]] = dict
    of_one: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    is_sum: bool = False

    def rows(self, fields: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """What the fields of an answer have for each sample."""
        return self.of_each(fields[self.field])


def shown_by(quantities: Iterable[Quantity]) -> Shown | None:
    """The field that tells most, if any does."""
    asked = {type(quantity): quantity for quantity in quantities}
    norms = asked.get(Norms) or asked.get(ClippedSum)  # which shows them, too
    if Grads in asked:
        return Shown(Grads.field)
    if isinstance(norms, Norms | ClippedSum):
        squared = isinstance(norms, Norms) and norms.squared
        whole = norms.per == "model"
        return Shown(Norms.field, _roots if squared else _named, _norm_of_all if whole else _norm_of_each)
    if Gram in asked:
        return Shown(Gram.field, lambda value: _roots(value.diagonal()), _norm_of_all)
    if MeanGrad in asked:
        return Shown(MeanGrad.field, _one_row, is_sum=True)
    moment = asked.get(SecondMoment)
    if isinstance(moment, SecondMoment) and not moment.centered:
        return Shown(SecondMoment.field, lambda value: _roots(_one_row(value)), _sizes, is_sum=True)
    return None


def by_autograd(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The gradient of a loss, which leaves nothing; None where its backward fails."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    try:
        with torch.autograd.set_multithreading_enabled(False):  # what is replaced for this thread holds in it, too
            wanted = list(parameters.values())
            found: Sequence[Tensor | None] = torch.autograd.grad(loss.sum(), wanted, allow_unused=True)
    except Exception:  # of the user's functions, or no memory
        return None
    zipped = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g.detach().to_dense() for (name, p), g in zipped}


class GradientAlone:
    """What the code itself gives for the last sample of a call, and `shown` must have for it.

    apart: how far the two may lie apart, relative to the sample's and to the batch's (of the mean sample).  dtypes: of
    the graph.  eps: what numbers of these are rounded to.
    """

    def __init__(
        self, shown: Shown, gradient: Mapping[str, Tensor], apart: float, dtypes: Iterable[torch.dtype]
    ) -> None:
        self._shown, self._apart, self._alone = shown, apart, shown.of_one(gradient)
        self.norm = _norm(self._alone.values())
        known = [torch.finfo(dtype) for dtype in dtypes]
        is_cuda, numbers = any(g.is_cuda for g in gradient.values()), sum(g.numel() for g in gradient.values())
        of_products = torch.finfo(torch.bfloat16).eps if may_round() else _OF_CUDA if is_cuda else 0.0
        self.eps = max(max(found.eps, of_products if found.bits == 32 else 0.0) for found in known)
        self._tiny = max(found.tiny for found in known) * math.sqrt(numbers)

    def differs(
        self, fields: Mapping[str, Any], size: int, gm: GraphModule, binding: Binding, arguments: Sequence[Any],
        of_sample: Sequence[Any],
    ) -> tuple[str, float, float] | None:  # fmt: skip
        """Where the answer to a batch of so many samples has another gradient for the last one, by more than rounding:
        the parameter that shows most of it ("" of a norm), the norm of the gradient, and how far it is apart.

        arguments: of the graph.  of_sample: those of the sample alone.
        """
        rows = self._shown.rows(fields)
        if self._shown.is_sum:
            known = facts.graph_facts(gm)
            if known.one_size or known.not_alone:
                return None
            rows, size, arguments = self._computed(gm, binding, of_sample), 1, of_sample
        if not self._is_apart(rows, size) or self._rounds(rows, gm, binding, arguments, of_sample):
            return None
        last = _last(rows)
        worst = max(self._alone, key=lambda name: _distance(self._alone, last, [name]))
        return worst, _norm(last.values()), _distance(self._alone, last)

    def of(self, gradient: Mapping[str, Tensor]) -> GradientAlone:
        """The same of another gradient."""
        found = copy.copy(self)
        found._alone = self._shown.of_one(gradient)
        found.norm = _norm(found._alone.values())
        return found

    def _is_apart(self, rows: Mapping[str, Tensor], size: int) -> bool:
        """Numbers that leave the range of their dtype tell nothing."""
        last = _last(rows)
        distance = _distance(self._alone, last)
        if not math.isfinite(distance) or distance <= self._apart * self.norm:
            return False
        squares = max((torch.finfo(row.dtype).tiny for row in rows.values()), default=0.0)
        least = self._tiny + math.sqrt(squares)
        return distance > max(self._apart * _norm(rows.values()) / math.sqrt(size), least)

    def _rounds(
        self, rows: Mapping[str, Tensor], gm: GraphModule, binding: Binding, arguments: Sequence[Any],
        of_sample: Sequence[Any],
    ) -> bool:  # fmt: skip
        """Whether the graph gives for the sample alone what the code does, or its own answer moves about as much where
        parameters and inputs are rounded otherwise: all terms of the gradient cancel, or of its norm.
        """
        try:
            if not self._is_apart(self._computed(gm, binding, of_sample), 1):
                return True
        except Exception:  # a graph for one size of batch alone
            pass
        last = _last(rows)
        for way in range(1, _WAYS + 1):
            try:
                moved = self._computed(gm, binding, _rounded(binding, arguments, self.eps, way))
            except Exception:
                return False
            if _TIMES * _distance(last, _last(moved)) >= _distance(self._alone, last):
                return True
        return False

    def _computed(self, gm: GraphModule, binding: Binding, arguments: Sequence[Any]) -> Mapping[str, Tensor]:
        places = [i for i, spec in enumerate(binding.outputs) if spec.field == self._shown.field]
        results: list[Any] = [None] * len(binding.outputs)
        for i, value in zip(places, facts.computed(gm, places, arguments), strict=True):
            results[i] = value
        return self._shown.rows(binding.fields(results))


def _named(value: Any) -> Mapping[str, Tensor]:
    """What is not of each parameter has the name ""."""
    return value if isinstance(value, Mapping) else {"": value}


def _roots(squares: Any) -> dict[str, Tensor]:
    return {name: value.clamp(min=0.0).sqrt() for name, value in _named(squares).items()}


def _one_row(value: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.unsqueeze(0) for name, each in value.items()}


def _sizes(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.abs() for name, g in gradient.items()}


def _norm_of_each(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.tensor(_norm([g]), dtype=torch.float64) for name, g in gradient.items()}


def _norm_of_all(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"": torch.tensor(_norm(gradient.values()), dtype=torch.float64)}


def _last(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the last sample."""
    return {name: row.detach()[-1] for name, row in rows.items()}


def is_noise(distance: float, gradient: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether a gradient is about as far from another one, of inputs a rounding away: no digit of it is right."""
    return _TIMES * _distance(gradient, other) >= distance


def _rounded(binding: Binding, arguments: Sequence[Any], eps: float, way: int) -> list[Any]:
    """The graph's inputs with each parameter and input a rounding away."""
    kinds = [spec.kind for spec in binding.specs]
    found = list(arguments)
    for i, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
        if kind in ("parameter", "input"):
            found[i] = rounded(value, eps, way)
    return found


def rounded(value: Tensor, eps: float, way: int = 1) -> Tensor:
    """Each element a rounding away, up or down; another way has other signs.  Whole numbers stay."""
    if not value.is_floating_point() and not value.is_complex():
        return value
    signs = torch.arange(1, value.numel() + 1, device=value.device).mul(way).cos().sign().to(value.dtype)
    return value * (1 + eps * signs.view(value.shape))


def _norm(values: Iterable[Tensor]) -> float:
    """Of all together."""
    return math.hypot(*(float(torch.linalg.vector_norm(value, dtype=_wide(value))) for value in values))


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str] | None = None) -> float:
    """The norm of the difference; what one of them lacks is zero."""

    def difference(name: str) -> Tensor:
        if name not in one or name not in other:
            return one[name] if name in one else other[name]
        return one[name].to(other[name].device, _wide(one[name])) - other[name]

    return _norm(map(difference, {**one, **other} if names is None else names))


def _wide(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64
