"""The kernel of `ops/products/weighted_sum_kernels.py` without a device: compiled, and executed by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from psg_fx.ops.products import weighted_sums

SHAPES = ((1, 5, 1), (3, 1000, 3), (16, 4100, 8))
"""Samples, elements, tensors."""


def signatures(pointer: str, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, dict[str, str], dict[str, Any]]]]:
    """Name -> kernel, types of its pointers, and what is compiled into it."""
    from psg_fx.ops.products import weighted_sum_kernels as kernels

    pointers = {"weights": "*fp32"}
    pointers |= {f"x{k}": pointer for k in range(kernels.AT_ONCE)} | {f"y{k}": "*fp32" for k in range(kernels.AT_ONCE)}
    for count in (1, kernels.AT_ONCE):
        yield f"weighted sums, {count}", (kernels.weighted_sum_kernel, pointers, kernels.meta(dtype, count, True))


def executed(named: Callable[[torch.dtype], str]) -> dict[str, dict[str, float]]:
    """What was summed -> the largest error, relative to the largest sum; rows that are left out are NaN."""
    from psg_fx.ops.products import weighted_sum_kernels as kernels

    found = {}
    for samples, elements, tensors in SHAPES:
        for dtype in weighted_sums.DTYPES:
            torch.manual_seed(0)
            weights = torch.randn(samples)
            weights[1::3] = 0
            values = [torch.randn(samples, elements).to(dtype) for _ in range(tensors)]
            for value in values:
                value[1::3] = torch.nan
            sums = [torch.full((elements,), torch.nan) for _ in values]
            own = {k: v for k, v in kernels.meta(dtype, tensors, True).items() if not k.startswith("num_")}
            kernels.weighted_sum_kernel[kernels.grid(values, own)](*kernels.arguments(weights, values, sums), **own)
            wide = [value.double().nan_to_num() for value in values]
            errors = [
                float((got.double() - weights.double() @ x).abs().max() / (weights.double() @ x).abs().max())
                for got, x in zip(sums, wide, strict=True)
            ]
            found[f"weighted sums {samples}x{elements}, {tensors} {named(dtype)}"] = {"error": max(errors)}
    return found
