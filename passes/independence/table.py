"""Rules of samples: how the output of an op carries the samples of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from psg_fx import op_table
from psg_fx.graph.facts import SampleAxis
from psg_fx.op_table import SampleRule as SampleRule
from psg_fx.ops.of_users.custom_call import custom_call

from .values import Op, Result

Placement = Result | SampleAxis | tuple[SampleAxis | None, ...] | None
Function = Callable[[Op], Placement]
F = TypeVar("F", bound=Function)


def sample_rule(
    *names: str, proof: str, sizes: bool = False, index: bool = False, shapes_only: bool = False
) -> Callable[[F], F]:
    """Register a rule for ops by schema name without `aten::`; a name may carry its overload, as `max.dim`."""

    def register(function: F) -> F:
        op_table.enter(*names, samples=SampleRule(function, proof, sizes, index, shapes_only))
        return function

    return register


def find(target: object) -> SampleRule | None:
    """The rule of an op: by overload, by name, or elementwise by torch's own `pointwise` tag."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if custom_call(target) is not None:
        return op_table.row(op_table.CUSTOM).samples
    found = op_table.known(target).samples
    return op_table.row(op_table.POINTWISE).samples if found is None and torch.Tag.pointwise in target.tags else found
