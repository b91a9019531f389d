"""From what a step returns to `p.grad`, which optimizers read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn

from psg_fx.errors import BadArgument
from psg_fx.torch_private.sharded import is_sharded_tensor, reshard


def set_grad(model: nn.Module, values: Mapping[str, torch.Tensor], scale: float | torch.Tensor = 1.0) -> None:
    """Set `p.grad` to `scale` times the value of its name, in the dtype of p.  Parameters without a value keep theirs.

    Args:
        model: its parameters may be whole, or sharded as the values are.
        values: by name, as in `out.clipped_sum`.  With a scale of 1 and the dtype of p, p.grad is that tensor itself.
        scale: 1 / (expected number of samples), say; a number, or a tensor without dims.

    Raises:
        BadArgument: no module, no mapping or no finite scale; a name that the model does not have, another shape, or a
            value that lies otherwise than p.
    """
    if not isinstance(values, Mapping):
        raise BadArgument(
            f"values is a {type(values).__name__}", where="psg_fx.distributed.set_grad(model, values)",
            why="parameters are found by name", fix="pass a field of a step's output, such as out.clipped_sum",
        )  # fmt: skip
    if not isinstance(model, nn.Module):
        raise BadArgument(
            f"model is a {type(model).__name__}", where="psg_fx.distributed.set_grad(model, values)",
            why="its parameters are found by name", fix="pass the module that the step was made of",
        )  # fmt: skip
    number: Any = scale
    if not (isinstance(number, Real) and math.isfinite(number)) and not (
        isinstance(number, torch.Tensor) and not number.ndim
    ):
        raise BadArgument(
            f"scale={scale!r} is no finite number", where="psg_fx.distributed.set_grad(model, values, scale)",
            why="every value is multiplied by it", fix="pass a float, such as 1 / (expected number of samples)",
        )  # fmt: skip
    reshard(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in values.items():
        p = parameters.get(name)
        if p is None or _place(value) != _place(p):
            raise BadArgument(
                f"the value of {name} does not fit the model", where="psg_fx.distributed.set_grad(model, values)",
                why="the model has no such parameter" if p is None else f"it is {_described(value)}, and the parameter "
                f"is {_described(p)}", fix="pass sums of a step of this model, and the model itself",
            )  # fmt: skip
    for name, value in values.items():
        p = parameters[name]
        p.grad = (value * scale if scale != 1.0 else value).to(p.dtype)


def _place(value: Any) -> tuple[Any, ...] | None:
    """Shape, device and, of a DTensor, how it is spread."""
    if not isinstance(value, torch.Tensor):
        return None
    spread = (value.device_mesh, value.placements) if is_sharded_tensor(value) else None  # type: ignore[attr-defined]
    return value.shape, value.device, spread


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    where = f"{list(value.shape)} on {value.device}"
    if not is_sharded_tensor(value):
        return f"plain {where}"
    mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
    return f"sharded {where}, as {', '.join(map(str, placements))} over {list(mesh.shape)} processes"
