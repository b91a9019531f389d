"""What libraries must be told that see a model but not its loss: where samples lie, and how their losses are joined."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from psg_fx.benchmarking.problem import Problem
from psg_fx.reference.loop import WithLoss, tracked


class CannotBeAsked(Exception):
    """The library computes something else: a sample's share in the gradient of the batch, through the outputs."""


@dataclass(frozen=True)
class Own:
    """A copy of the problem's model, for libraries that leave their marks on it.

    reduction: "sum" or "mean", how the loss of the batch is made of those of its samples.  losses: outputs -> `[B]`.
    """

    problem: Problem
    model: nn.Module
    params: Mapping[str, nn.Parameter]
    reduction: str
    losses: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, problem: Problem) -> Own:
        """Raises `CannotBeAsked` for a loss that is not a sum or mean over samples of a function of the outputs."""
        model = copy.deepcopy(problem.model)
        with torch.no_grad():
            outputs = outputs_of(problem, copy.deepcopy(model))
        losses = losses_of(problem, outputs)
        return cls(problem, model, tracked(model, None), reduction(problem, outputs, losses(outputs)), losses)

    @property
    def batch_first(self) -> bool:
        """Whether samples lie in dim 0 of the inputs, or else in dim 1: all that these libraries can be told."""
        batch = self.problem.batch
        found = next(d for leaf, d in zip(batch.leaves, batch.dims, strict=True) if isinstance(leaf, Tensor))
        if found not in (0, 1):
            raise CannotBeAsked(f"samples in dim {found}: only dims 0 and 1 can be said")
        return found == 0

    def backward(self, model: Callable[..., Any]) -> None:
        """An ordinary backward pass from the loss of the batch, through what a library has made of the model."""
        with quiet():
            loss: Tensor = _loss(self.problem)(outputs_of(self.problem, model), self.problem.targets)
            (loss.mean() if loss.dim() else loss).backward()

    def take(self, attribute: str) -> dict[str, Tensor]:
        """What a library left on the parameters under that name; then there is nothing left on them.

        So that a step starts as the one before did, and the memory of its answer counts.
        """
        found = {name: getattr(p, attribute, None) for name, p in self.params.items()}
        for p in self.params.values():
            for mark in ("grad", attribute):
                setattr(p, mark, None)
        if missing := [name for name, value in found.items() if value is None]:
            raise CannotBeAsked(f"{len(missing)} parameters were given nothing, among them {missing[0]}")
        return {name: value.detach() for name, value in found.items() if value is not None}


def outputs_of(problem: Problem, model: Callable[..., Any]) -> Tensor:
    """The model's output for the batch."""
    inputs = problem.inputs
    if isinstance(inputs, tuple):
        found = model(*inputs)
    else:
        found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if not isinstance(found, Tensor) or found.shape[:1] != (problem.batch.size,):
        raise CannotBeAsked("the model's output is not one tensor with the samples in dim 0")
    return found


def losses_of(problem: Problem, outputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Outputs -> `[B]` with ℓᵢ = loss_fn(outputs[i:i+1], targets[i:i+1]), in one batched computation.

    With the loss's own `reduction="none"` where it has one that says the same, as its users write it.
    """
    loss = _loss(problem)

    def by_definition(outputs: Tensor) -> Tensor:
        each = torch.func.vmap(lambda output, target: loss(output[None], target[None]).reshape(()))
        losses: Tensor = each(outputs, problem.targets)
        return losses

    def unreduced(outputs: Tensor) -> Tensor:
        return problem.loss_fn(outputs, problem.targets, reduction="none")

    if not isinstance(problem.targets, Tensor):
        raise CannotBeAsked("the targets are not one tensor")
    if "reduction" in signature(problem.loss_fn).parameters:
        expected, found = by_definition(outputs), unreduced(outputs)
        if found.shape == expected.shape and torch.allclose(found, expected):
            return unreduced
    return by_definition


def reduction(problem: Problem, outputs: Tensor, losses: Tensor) -> str:
    """How the loss of the batch is made of the losses `[B]` of its samples: "sum" or "mean"."""
    loss = _loss(problem)(outputs, problem.targets)
    if loss.requires_grad:
        raise CannotBeAsked("the loss reads parameters")
    if loss.dim() or torch.allclose(loss, losses.mean()):
        return "mean"
    if torch.allclose(loss, losses.sum()):
        return "sum"
    raise CannotBeAsked("the loss of the batch is neither the sum nor the mean of those of its samples")


def _loss(problem: Problem) -> WithLoss:
    return WithLoss(nn.Identity(), problem.loss_fn)


@contextmanager
def quiet() -> Iterator[None]:
    """Hides what torch and BackPACK warn of at every step; what follows from it, a missing gradient, is refused."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Extension saving to .* does not have an extension for Module")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", "Using a non-full backward hook")
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")
        yield
