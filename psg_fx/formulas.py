"""Ops in terms of simpler ones, with the same gradients, whose backward vmap runs for a symbolic batch size.

Used where the fallback runs an op that has no rule, and for ops on the way of a parameter to its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def cdist(a: torch.Tensor, b: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """d[.., i, j] = ‖a[.., i, :] - b[.., j, :]‖_p."""
    distance: torch.Tensor = torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)
    return distance


def einsum(equation: str, tensors: Sequence[torch.Tensor], path: Sequence[int] | None = None) -> torch.Tensor:
    """A letter that an operand repeats stands for its diagonal."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or all(len(set(term)) == len(term) for term in terms):
        return aten.einsum(equation, tensors, path=path)  # type: ignore[no-any-return]
    once = ["".join(dict.fromkeys(term)) for term in terms]
    diagonals = [_diagonal(x, term, new) for x, term, new in zip(tensors, terms, once, strict=True)]
    return aten.einsum(f"{','.join(once)}->{right}", diagonals, path=path)  # type: ignore[no-any-return]


def _diagonal(x: torch.Tensor, term: str, once: str) -> torch.Tensor:
    """x[.., i, .., i, ..] with one dim for each letter."""
    if term == once:
        return x
    sizes = dict(zip(term, x.shape, strict=True))
    steps = [torch.arange(sizes[k], device=x.device).view([-1 if k == own else 1 for own in once]) for k in term]
    return x[tuple(steps)]


def index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """With a mask that says where the same values go: y = values (accumulate: x + values) there, x elsewhere."""
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype is not torch.bool or values.ndim > x.ndim - mask.ndim:
        return aten.index_put(x, indices, values, accumulate)  # type: ignore[no-any-return]
    places = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    return torch.where(places, x + values if accumulate else values, x)


def _at_places(target: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """An op that returns values of x and their places along `dim`, as a look-up at places found without gradients."""
    names = [argument.name for argument in target._schema.arguments]

    def picked(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        places = target(x.detach(), *args, **kwargs)[1]
        flat = torch.arange(x.numel(), device=x.device).reshape(x.shape).gather(given.get("dim", -1), places)
        return x.reshape(-1)[flat], places

    return picked


FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.cdist.default: cdist,
    aten.einsum.default: einsum,
    aten.index_put.default: index_put,
    **{target: _at_places(target) for target in (aten.sort.default, aten.sort.stable, aten.topk.default)},
}
