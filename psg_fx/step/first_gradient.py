"""The gradient of one sample by autograd through the user's own code, beside what a step's first answer shows of it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from psg_fx.graph import facts
from psg_fx.step.binding import Binding
from psg_fx.step.shown import ByName, Shown, norm, wide
from psg_fx.torch_private.onednn import may_round

TIMES = 10.0
"""How many times as far as rounding moves it the gradient may lie apart: sums in another order round more often."""
_WAYS = 4
"""How many times rounding is tried: a squared norm that is lost in it is 0 as often as not."""
_OF_CUDA = 2.0**-11
"""What float32 may be rounded to in products on CUDA."""


def of_rounding(dtypes: Iterable[torch.dtype], is_cuda: bool) -> float:
    """What numbers of these dtypes are rounded to."""
    of_products = torch.finfo(torch.bfloat16).eps if may_round() else _OF_CUDA if is_cuda else 0.0
    known = [torch.finfo(dtype) for dtype in dtypes]
    return max((max(found.eps, of_products if found.bits == 32 else 0.0) for found in known), default=0.0)


def by_autograd(loss: Tensor, parameters: ByName) -> ByName | None:
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


@dataclass(frozen=True)
class Apart:
    """Where a batch has another gradient for a sample than the code for that sample alone.

    parameter: that shows most of it; "" of what is one of the model.  distance: between the two.  norm, alone: of what
    the batch has, and of what the code has.  what: of the gradient is compared.  compiled: it arose there.
    """

    parameter: str
    distance: float
    norm: float
    alone: float
    what: str
    compiled: bool = False


@dataclass(frozen=True)
class Answer:
    """A graph's answer to a batch of `size` samples.

    arguments: of the graph.  of_sample: those of the last sample alone.
    """

    fields: Mapping[str, Any]
    size: int
    gm: GraphModule
    binding: Binding
    arguments: Sequence[Any]
    of_sample: Sequence[Any]

    @property
    def runs_alone(self) -> bool:
        """Whether the graph answers for a batch of the last sample."""
        known = facts.graph_facts(self.gm)
        return not known.one_size and not known.not_alone

    def computed(self, field: str, arguments: Sequence[Any]) -> Mapping[str, Any]:
        """The field for other arguments."""
        places = [i for i, spec in enumerate(self.binding.outputs) if spec.field == field]
        results: list[Any] = [None] * len(self.binding.outputs)
        for i, value in zip(places, facts.computed(self.gm, places, arguments), strict=True):
            results[i] = value
        return self.binding.fields(results)

    def rounded(self, eps: float, arguments: Sequence[Any] | None = None) -> Iterator[list[Any]]:
        """The arguments, or others, with each parameter and input a rounding away, in several ways."""
        kinds = [spec.kind for spec in self.binding.specs]
        pairs = list(zip(kinds, self.arguments if arguments is None else arguments, strict=True))
        for way in range(1, _WAYS + 1):
            yield [rounded(value, eps, way) if kind in ("parameter", "input") else value for kind, value in pairs]


class GradientAlone:
    """What the code itself gives for the last sample of a call, and `shown` must have for it.

    apart: how far the two may lie apart, relative to the sample's and to the batch's (of the mean sample).  dtypes: of
    the graph.  eps: what numbers of these are rounded to.
    """

    def __init__(self, shown: Shown, gradient: ByName, apart: float, dtypes: Iterable[torch.dtype], eps: float) -> None:
        self._shown, self._apart, self._gradient, self.eps = shown, apart, gradient, eps
        numbers = sum(g.numel() for g in gradient.values())
        self._tiny = max(torch.finfo(dtype).tiny for dtype in dtypes) * math.sqrt(numbers)

    def of(self, gradient: ByName) -> GradientAlone:
        """The same of another gradient."""
        found = copy.copy(self)
        found._gradient = gradient
        return found

    def is_noise(self, apart: Apart, one: ByName, other: ByName, answer: Answer) -> bool:
        """Whether two gradients of the code, of inputs a rounding away, lie about as far apart: no digit is right."""
        moved = {name: _difference(g, other[name]) for name, g in one.items()}
        return TIMES * norm(self._of_one(moved, answer).values()) >= apart.distance

    def _of_one(self, gradient: ByName, answer: Answer) -> ByName:
        return self._shown.of_one(gradient, answer.binding.further(answer.arguments))

    def differs(self, answer: Answer) -> Apart | None:
        """Where the answer has another gradient for the last sample, by more than rounding."""
        alone = self._of_one(self._gradient, answer)
        rows, size = self._shown.rows(answer.fields), answer.size
        if self._shown.is_sum:
            if not answer.runs_alone:
                return None
            rows, size = self._computed(answer, answer.of_sample), 1
        if not self._is_apart(alone, rows, size) or self._rounds(alone, rows, answer):
            return None
        last = _last(rows)
        worst = max(alone, key=lambda name: _or_inf(_distance(alone, last, [name])))
        distance = _distance(alone, last)
        compiled = not self._shown.is_sum and self._is_compilers(self._whole(answer), rows, distance)
        return Apart(worst, distance, norm(last.values()), norm(alone.values()), self._shown.what, compiled)

    def _is_apart(self, alone: ByName, rows: ByName, size: int) -> bool:
        """Numbers that leave the range of their dtype tell nothing; far inside of it they are lost."""
        distance, of_alone = _distance(alone, _last(rows)), norm(alone.values())
        if not math.isfinite(distance):
            largest = min((torch.finfo(row.dtype).max for row in rows.values()), default=0.0)
            return of_alone < math.sqrt(largest) / TIMES
        if distance <= self._apart * of_alone:
            return False
        squares = max((torch.finfo(row.dtype).tiny for row in rows.values()), default=0.0)
        least = self._tiny + math.sqrt(squares)
        return distance > max(self._apart * norm(rows.values()) / math.sqrt(size), least)

    def _rounds(self, alone: ByName, rows: ByName, answer: Answer) -> bool:
        """Whether the graph, as it is before it is compiled, gives for the sample alone what the code does, or moves
        about as much where parameters and inputs are rounded otherwise: all terms of the gradient cancel, or of its
        norm.
        """
        whole = self._whole(answer)
        if whole is None:
            return False
        arguments = answer.of_sample if self._shown.is_sum else answer.arguments
        distance = _distance(alone, _last(rows))
        if not self._is_compilers(whole, rows, distance):
            with contextlib.suppress(Exception):  # a graph for one size of batch alone
                if not self._is_apart(alone, self._computed(answer, answer.of_sample), 1):
                    return True
        try:
            moved = (_last(self._computed(answer, each)) for each in answer.rounded(self.eps, arguments))
            return math.isfinite(distance) and any(TIMES * _distance(whole, each) >= distance for each in moved)
        except Exception:  # a graph for one size of batch alone
            return False

    def _whole(self, answer: Answer) -> ByName | None:
        """What the graph gives before it is compiled; None where it does not run, for want of memory, say."""
        try:
            return _last(self._computed(answer, answer.of_sample if self._shown.is_sum else answer.arguments))
        except Exception:
            return None

    def _is_compilers(self, whole: ByName | None, rows: ByName, distance: float) -> bool:
        """Whether most of a difference arose where the graph was compiled."""
        if whole is None:
            return False
        if not math.isfinite(distance):
            return math.isfinite(norm(whole.values()))
        return 2 * _distance(whole, _last(rows)) > distance

    def _computed(self, answer: Answer, arguments: Sequence[Any]) -> ByName:
        return self._shown.rows(answer.computed(self._shown.field, arguments))


def _last(rows: ByName) -> dict[str, Tensor]:
    """Of the last sample."""
    return {name: row.detach()[-1] for name, row in rows.items()}


def rounded(value: Tensor, eps: float, way: int = 1) -> Tensor:
    """Each element a rounding away, up or down; another way has other signs.  Whole numbers stay."""
    if not value.is_floating_point() and not value.is_complex():
        return value
    signs = torch.arange(1, value.numel() + 1, device=value.device).mul(way).cos().sign().to(value.dtype)
    return value * (1 + eps * signs.view(value.shape))


def _distance(one: ByName, other: ByName, names: Iterable[str] | None = None) -> float:
    """The norm of the difference; what one of them lacks is zero."""

    def difference(name: str) -> Tensor:
        if name not in one or name not in other:
            return one[name] if name in one else other[name]
        return _difference(one[name], other[name])

    return norm(map(difference, {**one, **other} if names is None else names))


def _or_inf(number: float) -> float:
    return number if math.isfinite(number) else math.inf


def _difference(one: Tensor, other: Tensor) -> Tensor:
    return one.to(other.device, wide(one)) - other
