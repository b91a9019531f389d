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


def _folded(op: Any, tensors: int) -> Any:
    """The rule of an op whose first `tensors` arguments and whose results carry the batch first."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        count = info.batch_size
        values = list(args)
        for k in range(tensors):
            if in_dims[k] is None:
                values[k] = values[k].expand(count, *values[k].shape)
            else:
                values[k] = values[k].movedim(in_dims[k], 0)
            values[k] = values[k].flatten(0, 1)
        out = op(*values, **kwargs)
        return tuple(t.unflatten(0, (count, -1)) for t in out), (0,) * len(out)

    return rule


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """While open.  Masks are not batched."""
    library = torch.library.Library("aten", "IMPL")
    for name, tensors in (("", 3), ("_backward", 6)):
        op = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{name}").default

        def batched(*args: Any, op: Any = op, rule: Any = _folded(op, tensors), **kwargs: Any) -> Any:
            interpreter = retrieve_current_functorch_interpreter()
            return custom_function_call_vmap_helper(interpreter, rule, op, *args, **kwargs)

        library.impl(op._schema.name.removeprefix("aten::"), batched, "FuncTorchBatched")
    try:
        yield
    finally:
        library._destroy()
