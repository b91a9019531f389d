"""`vmap` of the CPU's fused attention as of CUDA's: one call for all samples.

torch has such rules for CUDA's ops alone, and loops over the samples for the CPU's, which stands in for them here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

aten = torch.ops.aten


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """While open.  Masks are not batched."""
    library = torch.library.Library("aten", "IMPL")
    for name, tensors in (("", 3), ("_backward", 6)):
        op = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{name}").default
        library.impl(op._schema.name.removeprefix("aten::"), _batched(op, tensors), "FuncTorchBatched")
    try:
        yield
    finally:
        library._destroy()


def _batched(op: Any, tensors: int) -> Any:
    """An op whose first `tensors` arguments and whose results carry the batch first, for all samples at once."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for k, dim in enumerate(in_dims[:tensors]):
            stacked = values[k].expand(info.batch_size, *values[k].shape) if dim is None else values[k].movedim(dim, 0)
            values[k] = stacked.flatten(0, 1)
        out = op(*values, **kwargs)
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in out), (0,) * len(out)

    def call(*args: Any, **kwargs: Any) -> Any:
        return custom_function_call_vmap_helper(retrieve_current_functorch_interpreter(), rule, op, *args, **kwargs)

    return call
