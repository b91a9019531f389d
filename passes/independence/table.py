"""The table of rules: op name -> how its output carries the samples of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...errors import InternalError
from ...graph.facts import SampleAxis
from ...ops.autograd_function import custom_call
from .values import Op, Result

Answer = Result | SampleAxis | tuple[SampleAxis | None, ...] | None
Function = Callable[[Op], Answer]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class SampleRule:
    """apply: where the samples of the output lie, or a refusal.

    proof: the name of the argument, kept in the fact of the value.
    sizes: the rule understands arguments such as `2*B` (views, factories, slices).
    index: the rule may be given the numbers of the samples, `arange(B)`.
    shapes_only: the values of the tensor arguments do not matter (`zeros_like`).
    """

    apply: Function
    proof: str
    sizes: bool = False
    index: bool = False
    shapes_only: bool = False


RULES: dict[str, SampleRule] = {}


def sample_rule(
    *names: str, proof: str, sizes: bool = False, index: bool = False, shapes_only: bool = False
) -> Callable[[F], F]:
    """Register a rule for ops by schema name without `aten::`; a name may carry its overload, as `max.dim`."""

    def register(function: F) -> F:
        for name in names:
            if name in RULES:
                raise InternalError(
                    f"two independence rules for aten.{name}",
                    where=function.__module__,
                    why="an op has exactly one rule",
                    fix="remove one of them",
                )
            RULES[name] = SampleRule(function, proof, sizes, index, shapes_only)
        return function

    return register


def find(target: object) -> SampleRule | None:
    """The rule of an op: by overload, by name, or elementwise by torch's own `pointwise` tag."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if custom_call(target) is not None:
        return RULES["<custom>"]
    name = target._schema.name
    if name.startswith("aten::"):
        name = name.removeprefix("aten::")
    overload = f"{name}.{target._schema.overload_name or 'default'}"
    found = RULES.get(overload) or RULES.get(name)
    if found is None and torch.Tag.pointwise in target.tags:
        return RULES["<pointwise>"]
    return found
