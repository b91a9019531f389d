"""What a captured graph depends on of a call's arguments."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.state import argument
from psg_fx.program.values import Once
from psg_fx.tensors import memory_order

_KNOWN = "_key"
"""Where a call keeps its key, which `Call.like` hands on."""


def call_key(call: Call) -> Hashable:
    """What a captured graph depends on of one call's arguments: all but the batch size and the tensors' values."""
    known = vars(call)
    if _KNOWN not in known:
        known[_KNOWN] = Once(_key(call))
    return known[_KNOWN]  # type: ignore[no-any-return]


def _key(call: Call) -> Hashable:
    dims = call.dims
    if call.axes:
        starts = {axis.tensor for axis in call.axes if axis.closed}
        dims = tuple(p.dim if p is not None else d for p, d in zip(call.places, dims, strict=True))
        dims = tuple(0 if k in starts else d for k, d in enumerate(dims))
    inputs = tuple([
        (t.dtype, t.device, d, _others(t, d), _order(t), t.requires_grad)
        for t, d in zip(call.tensors, dims, strict=True)
    ])  # fmt: skip
    return inputs, call.structure, tuple([(place, argument(value)) for place, value in call.constants]), call.axes


def _others(tensor: torch.Tensor, dim: int | None) -> tuple[int, ...]:
    """The sizes but that of one dim."""
    return tensor.shape if dim is None else tensor.shape[:dim] + tensor.shape[dim + 1 :]


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """In which order the dims lie in memory, None for their own."""
    return None if tensor.is_contiguous() else tuple(memory_order(tensor))
