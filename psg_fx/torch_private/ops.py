"""What torch knows of an op."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._higher_order_ops.effects import has_effects
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload
from torch.nn.modules.adaptive import _ASMoutput

adaptive_output: Callable[[torch.Tensor, torch.Tensor], Any] = _ASMoutput
"""What `nn.AdaptiveLogSoftmaxWithLoss` returns: each target's log probability, and minus their mean."""

MAY_COPY = ("contiguous", "reshape", "reshape_as", "flatten", "ravel", "to")
"""What copies only what does not lie in memory as it needs it: ops, and functions of the same names."""


@functools.cache
def core_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Torch's decompositions into core ATen ops."""
    return dict(core_aten_decompositions())


def backward_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Torch's decompositions of the backward ops that it has one of."""
    return {
        op: function for op, function in decomposition_table.items()
        if isinstance(op, OpOverload) and "backward" in op._schema.name and op._overloadname == "default"
    }  # fmt: skip


def python_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """What computes a composite op by others: its composite kernel, or a function from torch's table."""
    if op._can_decompose():
        return op.decompose
    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found


def writes(op: object) -> bool:
    """Whether an op writes into an argument."""
    return isinstance(op, OpOverload) and bool(op._schema.is_mutable)


def written_arguments(op: Any) -> list[bool]:
    """Of each argument of an op, whether the op writes into it."""
    return [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]


def written_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call of an op is given for the arguments that the op writes into: some may be lists."""
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given[name] for name, is_written in zip(names, written_arguments(op), strict=True) if is_written]


def is_of_numbers(function: object) -> bool:
    """Whether a node that calls the function computes with sizes, or takes one of several results."""
    return getattr(function, "__module__", None) in (operator.getitem.__module__, "math", "torch")


def custom_op_name(op: object) -> str | None:
    """`mylib::myop` of what `torch.library.custom_op` returns; None of anything else."""
    return op._qualname if isinstance(op, CustomOpDef) else None


def has_effect(op: OpOverload) -> bool:
    """Whether an op is registered as one that does something beside computing its result."""
    arguments: tuple[Any, ...] = (op, (), {})[:_READ]
    return bool(has_effects(*arguments))


_READ = len(inspect.signature(has_effects).parameters)
"""How many arguments torch asks for: the op alone since torch 2.10."""


def as_no_view(value: torch.Tensor) -> torch.Tensor:
    """The same memory as what an op makes that returns no view, whose results everybody may write into."""
    found: torch.Tensor = torch.ops.aten._unsafe_view(value, value.shape)
    return found
