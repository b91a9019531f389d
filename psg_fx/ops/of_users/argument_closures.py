"""Functions among the arguments of a custom function that read another argument by themselves: `quadrature(f, x, w)`
where f closes over w.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_MOST = 1000
"""Objects that are looked at for a tensor."""


def reading(value: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """A function that, wherever it is called, reads others in the places of some tensors; anything else, and a function
    that holds none of these, as it is.

    others: by the identity of the tensors.
    """
    if not isinstance(value, (FunctionType, MethodType, functools.partial)) or not _holds(value, others):
        return value

    @functools.wraps(value)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _Instead(others):
            return value(*args, **kwargs)

    return called


class _Instead(TorchFunctionMode):
    def __init__(self, others: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def other(tensor: torch.Tensor) -> torch.Tensor:
            return self.others.get(id(tensor), tensor)

        args, kwargs = pytree.tree_map_only(torch.Tensor, other, (args, kwargs or {}))
        return func(*args, **kwargs)


def _holds(function: Any, tensors: Mapping[int, torch.Tensor]) -> bool:
    """Whether one of these tensors is found in a function or in what it holds, by its identity."""
    waiting, seen = [function], {id(function): function}
    while waiting and len(seen) < _MOST:
        for part in _parts(waiting.pop()):
            if id(part) in tensors and isinstance(part, torch.Tensor):
                return True
            if id(part) not in seen and not isinstance(part, torch.Tensor):
                seen[id(part)] = part  # kept, so that no other object takes its identity
                waiting.append(part)
    return False


def _parts(value: Any) -> Iterable[Any]:
    """What a function, a container or an object holds; modules are read otherwise."""
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]
        return [*(cell.cell_contents for cell in cells), *(value.__defaults__ or ())]
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, (list, tuple, dict)):
        return (value.values() if isinstance(value, dict) else value) if len(value) < _MOST else ()
    is_plain = hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, nn.Module))
    return vars(value).values() if is_plain else ()
