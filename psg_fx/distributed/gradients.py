"""From what a step returns to `p.grad`, which optimizers read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from psg_fx.errors import BadArgument
from psg_fx.torch_private.sharded import is_sharded_tensor


def set_grad(model: nn.Module, values: Mapping[str, torch.Tensor], scale: float = 1.0) -> None:
    """Set `p.grad` to `scale` times the value of its name, in the dtype of p.  Parameters without a value keep theirs.

    Args:
        model: its parameters may be whole, or sharded as the values are.
        values: by name, as in `out.clipped_sum`.
        scale: 1 / (expected number of samples), say.

    Raises:
        BadArgument: a name that the model does not have, another shape, or a value that lies otherwise than p.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in values.items():
        p = parameters.get(name)
        if p is None or p.shape != value.shape or is_sharded_tensor(p) != is_sharded_tensor(value):
            raise BadArgument(
                f"the value of {name} does not fit the model", where="psg_fx.distributed.set_grad(model, values)",
                why="the model has no such parameter" if p is None else f"it is {_described(value)}, and the parameter "
                f"is {_described(p)}", fix="pass sums of a step of this model, and the model itself",
            )  # fmt: skip
    for name, value in values.items():
        p = parameters[name]
        p.grad = (value * scale if scale != 1.0 else value).to(p.dtype)


def _described(value: torch.Tensor) -> str:
    return f"{'sharded' if is_sharded_tensor(value) else 'plain'} {list(value.shape)}"
