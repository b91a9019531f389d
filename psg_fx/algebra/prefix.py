"""Between a parameter and the operand that a site reads: gradients are pulled back, directions are pushed forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psg_fx.algebra.gradient import Term
from psg_fx.algebra.network import Kind, Source
from psg_fx.algebra.site import Prefix
from psg_fx.ops.in_other_ops import Gathered
from psg_fx.ops.of_users.per_sample import for_each_sample
from psg_fx.tensors import HALF

aten = torch.ops.aten


def pull_back(
    term: Term, name: str, value: torch.Tensor, env: Mapping[Source, torch.Tensor], batched: bool
) -> torch.Tensor:
    """From the operand back to the parameter through what made it: Jᵀ v, for each sample if `batched`."""
    prefix = term.prefix
    if prefix.trivial:
        return value
    inputs = [env[source] for source in sources(prefix)]
    pull = _pull(prefix, name)
    if not batched:
        return pull(value, *inputs)
    return for_each_sample(pull, [0, *[None] * len(inputs)], [value, *inputs], *_words(term, name))


def push_forward(term: Term, name: str, several: bool) -> Callable[..., torch.Tensor]:
    """A function (direction, *inputs) -> J v: what a change of the parameter does to the operand; for each of several
    directions if so.  It is the transpose of the pull-back: ⟨Jᵀ u, v⟩ = ⟨u, J v⟩.
    """
    prefix, pull = term.prefix, _pull(term.prefix, name)

    def push(direction: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        operand = _run(prefix, inputs)
        found: torch.Tensor = torch.func.vjp(lambda u: pull(u, *inputs), torch.zeros_like(operand))[1](direction)[0]
        return found

    def each(directions: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return for_each_sample(push, [0, *[None] * len(inputs)], [directions, *inputs], *_words(term, name))

    return each if several else push


def sources(prefix: Prefix) -> list[Source]:
    """The values of the joint graph that the prefix reads."""
    return [Source(Kind.ACTIVATION if name in prefix.drawn else Kind.PLACEHOLDER, name) for name in prefix.inputs]


def _pull(prefix: Prefix, name: str) -> Callable[..., torch.Tensor]:
    """(cotangent of the operand, *inputs) -> the gradient of the parameter."""
    own = [i for i, n in enumerate(prefix.inputs) if prefix.owners[n] == name]

    def pull(cotangent: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        def operand(*parameters: torch.Tensor) -> Any:
            replaced = dict(zip(own, parameters, strict=True))
            return _run(prefix, [replaced.get(i, value) for i, value in enumerate(inputs)], cotangent.dtype)

        result, back = torch.func.vjp(operand, *(inputs[i] for i in own))[:2]
        first, *others = back(cotangent.to(result.dtype))
        total: torch.Tensor = sum(others, start=first)
        return total

    return pull


def _run(prefix: Prefix, inputs: Sequence[torch.Tensor], asked: torch.dtype | None = None) -> torch.Tensor:
    """The operand.  asked: of a dtype with more digits than the operand has, without the casts to half precision, whose
    transpose would round what is pulled back.
    """
    assert prefix.graph is not None
    rounds = prefix.half and asked is not None and asked not in HALF
    found: torch.Tensor = (_WithoutCasts if rounds else Gathered)(prefix.graph).run(*inputs)
    return found


class _WithoutCasts(Gathered):
    """Runs a graph in the dtypes of its inputs, where these have more digits."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        casts = target is aten._to_copy.default and kwargs.get("dtype") in HALF
        if casts and args[0].is_floating_point() and args[0].dtype not in HALF:
            kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
        return super().call_function(target, args, kwargs)


def _words(term: Term, name: str) -> tuple[str, str]:
    return "·".join(term.prefix.ops), f"{term.where} (on the way of {name})"
