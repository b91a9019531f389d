"""What answers of a benchmark are held against: `vmap(grad)` or the loop, and, where they differ from it, float64."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from psg_fx.benchmarking.problem import Problem, from_grads
from psg_fx.quantities.base import Quantity
from psg_fx.reference.by_vmap import vmap_reference
from psg_fx.reference.definitions import Answer
from psg_fx.reference.loop import reference_grads

_SUSPECT = 1e-4
"""Errors above which an answer is held against float64, too.  Rounding passes kinks: which of two entries of a pool is
larger, on which side of a ReLU's zero a value is.  Whoever rounds otherwise differs there by all that hangs on it, and
in float32 nobody knows who is right.
"""


class Judge:
    """What each quantity should be, in the dtype of the model, of those that a formula makes of gradients."""

    def __init__(self, problem: Problem, quantities: Mapping[str, Quantity]) -> None:
        self.problem = problem
        self.quantities = quantities
        self.asked_again = False
        """Whether float64 has decided."""
        grads, self.name = _reference(problem)
        self._expected = self._of(grads, problem.given)

    def error(self, quantity: str, answer: Answer) -> float | None:
        """How far an answer is off (`answer_error`); None: not known."""
        if quantity not in self._expected:
            return None
        found = answer_error(answer, self._expected[quantity])
        if found <= _SUSPECT or quantity not in self._exact:
            return found
        other = answer_error(answer, self._exact[quantity])
        if not other < found and not math.isnan(found):
            return found
        self.asked_again = True
        return other

    @functools.cached_property
    def _exact(self) -> dict[str, Answer]:
        """The same by the loop in float64; nothing where that is not to be had."""
        if torch.is_autocast_enabled(self.problem.device.type):
            return {}
        with contextlib.suppress(Exception):  # of any model: it may insist on its dtype
            grads = reference_grads(*self.problem.call, batch_dim=self.problem.batch_dim)[1]
            return self._of(grads, self._given_exactly)
        return {}

    def _given_exactly(self, quantity: Quantity) -> dict[str, Any]:
        exactly: dict[str, Any] = tree_map(Tensor.double, self.problem.given(quantity))
        return exactly

    def _of(self, grads: Mapping[str, Tensor], given: Callable[[Quantity], dict[str, Any]]) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        for label, quantity in self.quantities.items():
            with contextlib.suppress(NotImplementedError):
                found[label] = from_grads(quantity, grads, given(quantity))
        return found


def _reference(problem: Problem) -> tuple[Mapping[str, Tensor], str]:
    """Gradients `name -> [B, *shape]` to hold answers against, and who made them: vmap, or the loop where it fails."""
    try:
        return vmap_reference(*problem.call, batch_dim=problem.batch_dim)[1], "vmap(grad)"
    except Exception:  # vmap refuses in many ways; the loop then decides
        return reference_grads(*problem.call, batch_dim=problem.batch_dim, dtype=None)[1], "the loop over samples"


def answer_error(got: Answer, want: Answer) -> float:
    """The largest difference relative to each tensor's largest entry (at least 1e-3 of the largest of all)."""
    if isinstance(want, Tensor):
        want = {"": want}
    if isinstance(got, Tensor):
        got = {"": got}
    if missing := set(want) ^ set(got):
        raise ValueError(f"the answer's names differ: {sorted(missing)}")
    largest = {name: w.abs().max().item() for name, w in want.items()}
    floor = 1e-3 * max(largest.values(), default=0.0)
    errors = [0.0]
    for name, w in want.items():
        if got[name].shape != w.shape:
            raise ValueError(f"{name} has shape {tuple(got[name].shape)}, expected {tuple(w.shape)}")
        difference = (got[name] - w).abs().max().item()
        if difference:
            scale = max(largest[name], floor)
            errors.append(difference / scale if scale else math.inf)
    return max(errors) if not any(math.isnan(e) for e in errors) else math.nan
