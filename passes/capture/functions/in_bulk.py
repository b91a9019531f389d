"""Functions of lists of tensors (`torch._foreach_mul`), written as what they do to each: y_k = f(x_k, ..)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psg_fx.op_table import at_capture

_BULK = "_foreach_"


def _maximum(x: Tensor, other: Any) -> Tensor:
    return torch.maximum(x, other) if isinstance(other, Tensor) else x.clamp_min(other)


def _minimum(x: Tensor, other: Any) -> Tensor:
    return torch.minimum(x, other) if isinstance(other, Tensor) else x.clamp_max(other)


def _by_value(one: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of `addcmul` and `addcdiv`, whose number has a name alone."""

    def run(x: Tensor, first: Tensor, second: Tensor, value: Any = 1, scalars: Any = None) -> Tensor:
        return one(x, first, second, value=value if scalars is None else scalars)

    return run


_CALLED: dict[str, Callable[..., Any]] = {
    "norm": torch.linalg.vector_norm, "maximum": _maximum, "minimum": _minimum,
    "addcmul": _by_value(torch.addcmul), "addcdiv": _by_value(torch.addcdiv),
    "addcmul_": _by_value(Tensor.addcmul_), "addcdiv_": _by_value(Tensor.addcdiv_),
}  # fmt: skip


def _each(one: Callable[..., Any], writes: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if "self" in kwargs:
            args = (kwargs.pop("self"), *args)
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]

        def of(k: int, value: Any) -> Any:
            return value[k] if isinstance(value, (list, tuple)) else value

        found = [
            one(*(of(k, a) for a in args), **{name: of(k, a) for name, a in kwargs.items()})
            for k in range(len(lists[0]))
        ]
        return lists[0] if writes else tuple(found)

    return run


for _name in (name.removeprefix(_BULK) for name in dir(torch) if name.startswith(_BULK)):
    _one = _CALLED.get(_name) or getattr(torch, _name, None) or getattr(Tensor, _name, None)
    if _one is not None:
        at_capture(getattr(torch, _BULK + _name))(_each(_one, _name.endswith("_")))
