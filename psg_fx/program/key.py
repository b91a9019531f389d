"""What a captured graph depends on of a call's arguments."""

from __future__ import annotations

from typing import Any

from psg_fx.program.call import Call
from psg_fx.program.values import argument
from psg_fx.tensors import memory_order


def call_key(call: Call) -> Any:
    """What a captured graph depends on of one call's arguments: all but the batch size and the tensors' values."""
    inputs = tuple(
        (t.dtype, t.device, d, *(s for i, s in enumerate(t.shape) if i != d), tuple(memory_order(t)), t.requires_grad)
        for t, d in zip(call.tensors, call.dims, strict=True)
    )
    return inputs, call.spec, tuple((place, argument(value)) for place, value in call.constants)
