"""Inputs and targets as a step is given them: one tensor, several, named ones, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psg_fx.program.arguments.packed import is_packed

ABSENT: Any = object()
"""What stands for an argument that was not given."""


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple or a dict as (args, kwargs); both are empty for what was not given."""
    if isinstance(value, torch.Tensor):  # most are, and a class of Python is asked less fast
        return (value,), {}
    if value is ABSENT:
        return (), {}
    if isinstance(value, (tuple, list)) and not is_packed(value):
        return tuple(value), {}
    if isinstance(value, Mapping):
        return (), dict(value)
    return (value,), {}
