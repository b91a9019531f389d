"""Weighted sums by psg_fx's kernel on a CUDA device, and clipped sums without a sample that is not finite."""

from __future__ import annotations

import pytest
import torch

import psg_fx
from psg_fx import ClippedSum, zoo
from psg_fx.ops.products import weighted_sums
from support import oracle
from support.device import CUDA

pytestmark = [*CUDA, pytest.mark.usefixtures("fresh_compiler", "full_precision")]

SHAPES = [(3, 70, 1), (1, 1, 2), (16, 4100, 3), (5, 300_001, 11), (130, 2048, 8)]
"""Samples, elements, tensors: most do not divide blocks, and one is more than a launch takes."""


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", weighted_sums.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone(shape: tuple[int, int, int], dtype: torch.dtype, compiled: bool, leave_out: bool) -> None:
    samples, elements, tensors = shape
    torch.manual_seed(0)
    weights = torch.randn(samples, device="cuda")
    values = [torch.randn(samples, elements, device="cuda").to(dtype) for _ in range(tensors)]
    present = torch.arange(samples, device="cuda") % 3 != 1
    if leave_out:
        weights[~present] = 0
        for value in values:
            value[~present] = torch.nan
    run = torch.compile(weighted_sums.weighted_sums) if compiled else weighted_sums.weighted_sums
    found = run(weights, values, leave_out)
    kept = present if leave_out else torch.ones_like(present)
    for got, value in zip(found, values, strict=True):
        assert oracle.relative_error(got, weights[kept].double() @ value[kept].double()) < 1e-6


def test_where_a_row_is_beyond_32_bits() -> None:
    weights = torch.tensor([1.0, -1.0, 0.5], device="cuda")
    value = torch.randn(3, 2**30, device="cuda", dtype=torch.bfloat16)
    (found,) = weighted_sums.weighted_sums(weights, [value], False)
    part = slice(2**30 - 5000, None)
    assert oracle.relative_error(found[part], weights.double() @ value[:, part].double()) < 1e-6


@pytest.mark.inductor
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", ["simplecnn", "vit"])
def test_a_sample_that_is_not_finite(name: str, mode: str | None) -> None:
    """It is left out without a look at the norms, by the same graph as every batch."""
    sizes = {"vit": {"layers": 1, "width": 256, "heads": 2, "image": 32, "patch": 4}}.get(name, {})
    ex = zoo.example(name, batch=32, device="cuda", **sizes)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(0.5), mode=mode, dynamic=False)
    for _ in range(3):
        step(ex.inputs, ex.targets)
    rest = [b for b in range(32) if b != 7]
    _, grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs[rest], ex.targets[rest], dtype=torch.float64)
    ex.inputs[7] = torch.inf
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step(ex.inputs, ex.targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.clip_factors[7] == 0
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.5)) < 5e-5
    assert not out.norms[7].isfinite()
