"""The gradient of one sample by autograd through the user's own code, beside what a step's first answer shows of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from psg_fx.graph import facts
from psg_fx.quantities.base import Quantity
from psg_fx.quantities.products import Gram
from psg_fx.quantities.sums import Grads, Norms
from psg_fx.step.binding import Binding
from psg_fx.torch_private.onednn import may_round

_TIMES = 10.0
"""How many times as far as rounding moves it the gradient may lie apart: sums in another order round more often."""
_OF_CUDA = 2.0**-11
"""What float32 may be rounded to in products on CUDA."""


@dataclass(frozen=True)
class Shown:
    """A field of the output with what tells each sample's gradient from others: itself, or its norm."""

    field: str
    of_each: Callable[[Any], Mapping[str, Tensor]]

    def rows(self, fields: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Name -> [B, *shape]; of a norm "" -> [B]."""
        return self.of_each(fields[self.field])


def shown_by(quantities: Iterable[Quantity]) -> Shown | None:
    """The field that tells most, if any does."""
    asked = {type(quantity): quantity for quantity in quantities}
    norms = asked.get(Norms)
    if Grads in asked:
        return Shown(Grads.field, dict)
    if isinstance(norms, Norms) and norms.per == "model":
        return Shown(Norms.field, _from_squares if norms.squared else lambda value: {"": value})
    return Shown(Gram.field, lambda value: _from_squares(value.diagonal())) if Gram in asked else None


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
    the graph.
    """

    def __init__(
        self, shown: Shown, gradient: Mapping[str, Tensor], apart: float, dtypes: Iterable[torch.dtype]
    ) -> None:
        self._shown, self._apart, self.norm = shown, apart, _norm(gradient.values())
        is_whole = shown.field == Grads.field
        self._alone = gradient if is_whole else {"": torch.tensor(self.norm, dtype=torch.float64)}
        known = [torch.finfo(dtype) for dtype in dtypes]
        is_cuda, numbers = any(g.is_cuda for g in gradient.values()), sum(g.numel() for g in gradient.values())
        of_products = torch.finfo(torch.bfloat16).eps if may_round() else _OF_CUDA if is_cuda else 0.0
        self._eps = max(max(found.eps, of_products if found.bits == 32 else 0.0) for found in known)
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
        if not self._is_apart(rows, size) or self._rounds(rows, gm, binding, arguments, of_sample):
            return None
        last = _last(rows)
        worst = max(self._alone, key=lambda name: _distance(self._alone, last, [name]))
        return worst, _norm(last.values()), _distance(self._alone, last)

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
        parameters are rounded otherwise: all terms of the gradient cancel.
        """
        try:
            if not self._is_apart(self._computed(gm, binding, of_sample), 1):
                return True
        except Exception:  # a graph for one size of batch alone
            pass
        try:
            moved = self._computed(gm, binding, _rounded(binding, arguments, self._eps))
        except Exception:
            return False
        last = _last(rows)
        return _TIMES * _distance(last, _last(moved)) >= _distance(self._alone, last)

    def _computed(self, gm: GraphModule, binding: Binding, arguments: Sequence[Any]) -> Mapping[str, Tensor]:
        places = [i for i, spec in enumerate(binding.outputs) if spec.field == self._shown.field]
        results: list[Any] = [None] * len(binding.outputs)
        for i, value in zip(places, facts.computed(gm, places, arguments), strict=True):
            results[i] = value
        return self._shown.rows(binding.fields(results))


def _from_squares(value: Tensor) -> dict[str, Tensor]:
    return {"": value.clamp(min=0.0).sqrt()}


def _last(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the last sample."""
    return {name: row.detach()[-1] for name, row in rows.items()}


def _rounded(binding: Binding, arguments: Sequence[Any], eps: float) -> list[Any]:
    """The graph's inputs with each parameter a rounding away."""
    kinds = [spec.kind for spec in binding.specs]
    found = list(arguments)
    for i, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "parameter" and (value.is_floating_point() or value.is_complex()):
            signs = torch.arange(value.numel(), device=value.device).cos().sign().to(value.dtype)
            found[i] = value * (1 + eps * signs.view(value.shape))
    return found


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
