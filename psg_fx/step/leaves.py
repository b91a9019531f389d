"""The tensors of an output, each with its field and, where the field is a mapping, its name in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

Key = tuple[str, str | None]
"""A field of the output, and the parameter, or None where the field is a tensor itself."""


def leaves(fields: Mapping[str, Any]) -> Iterator[tuple[Key, torch.Tensor]]:
    """Every tensor of the fields."""
    for field, value in fields.items():
        if isinstance(value, torch.Tensor):
            yield (field, None), value
        else:
            yield from (((field, name), tensor) for name, tensor in value.items())


def nested(named: Mapping[Key, torch.Tensor]) -> dict[str, Any]:
    """The fields with these tensors."""
    fields: dict[str, Any] = {}
    for (field, name), tensor in named.items():
        if name is None:
            fields[field] = tensor
        else:
            fields.setdefault(field, {})[name] = tensor
    return fields
