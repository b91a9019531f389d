"""Inputs that a program is captured with: of sizes that nothing else has, so that nothing can be mistaken for them."""

from __future__ import annotations

import torch
from torch import nn

from psg_fx.program.arguments.call import Call
from psg_fx.tensors import memory_order

_HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
"""Primes, so that no product of other sizes is one of them."""


def example_like(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """A tensor like `tensor` with `size` samples in `dim`, in the same memory order.  Its values mean nothing."""
    if dim is None:
        same = tensor.clone() if tensor.is_inference() else tensor.detach()
        return same.requires_grad_(tensor.requires_grad)
    sizes = [size if d == dim else tensor.shape[d] for d in range(tensor.ndim)]
    strides, step = [1] * tensor.ndim, 1
    for d in reversed(memory_order(tensor)):
        strides[d], step = step, step * max(sizes[d], 1)
    made = tensor.new_empty_strided(sizes, strides).zero_()  # not a view: its base would be made fake as well
    return made.requires_grad_(tensor.requires_grad)


def rows_in(call: Call) -> list[tuple[int, int] | None]:
    """Of each input, the dim whose size is that of an axis of rows, and the number of the axis; -1: it is B + 1."""
    closed = {axis.tensor for axis in call.axes if axis.closed}
    places = call.places or (None,) * len(call.tensors)
    rows = [None if p is None else (p.dim, p.axis) for p in places]
    return [(0, -1) if k in closed else place for k, place in enumerate(rows)]


def sizes_of_their_own(call: Call, program: nn.Module) -> list[int]:
    """A number of samples, and of rows along each axis, that no other size equals."""
    used = {size for t in (*call.tensors, *program.parameters()) for size in t.shape}
    found = [h for h in _HINTS if h not in used and (not call.axes or h + 1 not in used)]
    return (found + [h for h in _HINTS if h not in found])[: 1 + len(call.axes)]
