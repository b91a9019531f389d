"""`p.grad_sample` from call to call: when it is set, replaced, collected or refused.

A `grad_sample` belongs to a batch and to the values that the parameters had.  Nothing is added up in silence, since the
rows of two batches are other samples, and nothing is lost in silence, since `backward()` is known for adding up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from psg_fx.errors import BadArgument

_events = itertools.count()
Parameters = Mapping[str, torch.Tensor]


Version = tuple[int, int]


@dataclass
class Left:
    """A mark on a `grad_sample`: when its backward ended, and the versions of the step's parameters then, by `id`.

    stepped: an optimizer has stepped since (kernels that update all parameters at once write without a new version).
    """

    event: int
    versions: dict[int, Version]
    stepped: bool = False

    def is_stale(self, versions: Mapping[int, Version]) -> bool:
        """Whether a parameter has been written since: the gradients are those of other values."""
        return self.stepped or any(self.versions.get(key, version) != version for key, version in versions.items())


_MARKS: MutableMapping[torch.Tensor, Left] = WeakTensorKeyDictionary()
"""Of every `grad_sample`, beside it: what is an attribute of a tensor is saved with it."""


@dataclass(frozen=True)
class Ticket:
    """One call of a step: when it began, whether its gradients join those of other calls, and what they are times."""

    event: int
    accumulate: bool
    mean: bool


def begin(parameters: Parameters, accumulate: bool, mean: bool) -> Ticket:
    """A call with gradients.  What earlier calls left on parameters that have changed since is dropped.

    Raises BadArgument: a `grad_sample` of the parameters as they are, that is not to be accumulated.
    """
    versions, last, stale = _versions(parameters), None, False
    for name, parameter in parameters.items():
        left = getattr(parameter, "grad_sample", None)
        if left is None:
            continue
        mark = _mark(left)
        if mark is not last:  # one backward leaves one mark on all
            last, stale = mark, mark is not None and mark.is_stale(versions)
        if stale:
            parameter.grad_sample = None  # type: ignore[attr-defined]
        elif not accumulate or mark is None:
            raise BadArgument(
                f"{name} still has a grad_sample", where="step(*args, **kwargs)",
                why="a second backward would overwrite the per-sample gradients of another batch",
                fix="step.zero_grad() clears grad_sample and grad, where optimizer.zero_grad() knows grad only; "
                "transform(..., accumulate=True) makes it a list, with an entry for each call; torch.no_grad() if no "
                "gradients are wanted",
            )  # fmt: skip
    return Ticket(next(_events), accumulate, mean)


def drop_stale(parameters: Iterable[torch.Tensor]) -> None:
    """What psg_fx has left on parameters that have been written since, those among them that are frozen now."""
    for parameter in parameters:
        mark = _mark(getattr(parameter, "grad_sample", None))
        if mark is not None and mark.is_stale({id(parameter): _version(parameter)}):
            parameter.grad_sample = None  # type: ignore[attr-defined]


def deliver(ticket: Ticket, parameters: Parameters, found: Mapping[str, torch.Tensor], copied: bool) -> None:
    """Set `grad_sample`, or append to it.  copied: the values are overwritten by a later call.

    Raises BadArgument: another backward came between the call and this one, or a `grad_sample` was not set by psg_fx.
    """
    for name, parameter in parameters.items():
        left = getattr(parameter, "grad_sample", None)
        mark = _mark(left)
        if left is not None and (not ticket.accumulate or mark is None or mark.event > ticket.event):
            raise BadArgument(
                f"{name} still has a grad_sample", where="backward()",
                why="a second backward would overwrite the per-sample gradients of another batch",
                fix="call the step once for each backward, and backward before the next call: a model that runs twice "
                "in one loss is one module that runs it twice",
            )  # fmt: skip
    _watch_optimizers()
    mark = Left(next(_events), _versions(parameters))
    for name, value in found.items():
        parameter = parameters[name]
        left = getattr(parameter, "grad_sample", None)
        value = value.clone() if copied and ticket.accumulate else value
        _MARKS[value] = mark
        former = left if isinstance(left, list) else [] if left is None else [left]
        parameter.grad_sample = [*former, value] if former else value  # type: ignore[attr-defined]


def clear(parameters: Any) -> None:
    """No parameter has a `grad_sample`."""
    for parameter in parameters:
        if getattr(parameter, "grad_sample", None) is not None:
            parameter.grad_sample = None


def _mark(left: Any) -> Left | None:
    last = left[-1] if isinstance(left, list) and left else left
    return _MARKS.get(last) if isinstance(last, torch.Tensor) else None


def _versions(parameters: Parameters) -> dict[int, Version]:
    """How often each was written, and where it lies: `p.data = ...` is another place."""
    return {id(p): _version(p) for p in parameters.values()}


def _version(parameter: torch.Tensor) -> Version:
    return parameter._version, parameter.data_ptr()


@functools.cache
def _watch_optimizers() -> None:
    """From now on, a step of an optimizer of torch marks the `grad_sample` of what it updates."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mark = _mark(getattr(parameter, "grad_sample", None)) if parameter.grad is not None else None
            if mark is not None:
                mark.stepped = True
