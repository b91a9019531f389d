"""Samples whose gradient is not finite have no part in a clipped sum, in steps for a CUDA device without a look at
them: rows of the matrix and models of the zoo, planned and lowered for such a device, on the CPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import psg_fx
from psg_fx import ClippedSum, WeightedSum, zoo
from psg_fx.ops.products import weighted_sums
from psg_fx.planner import rates
from psg_fx.step import with_loss
from psg_fx.step.settings import Settings
from support import oracle
from support.cases import CASES, Case
from support.expected import tolerance_of
from support.selection import one_in

BAD = 1
"""The sample that is not finite."""


@pytest.fixture
def for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are planned and lowered for a CUDA device, and may not look at norms."""
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: rates.H100)
    monkeypatch.setattr(with_loss, "with_finite_sum", looked)


def looked(*_: object) -> None:
    raise AssertionError("the step looked at the norms")


def poisoned(case: Case) -> tuple[Tensor, ...]:
    """The data of a row, NaN in place of one sample."""
    data = tuple(x.clone() for x in case.data())
    for x, dim in zip(data, case.dims[0], strict=True):
        if dim is not None and x.is_floating_point():
            x.select(dim, BAD).fill_(torch.nan)
    return data


def others(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the samples that have finite ones."""
    finite = oracle.norms(grads).isfinite()
    return {name: g[finite] for name, g in grads.items()}


REFUSE_NAN = ("traps/gaussian",)
"""Rows whose own program does."""

ROWS = [case for case in CASES if not case.refused and case.x is not None and case.name not in REFUSE_NAN]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", one_in(8, ROWS))
def test_rows_of_the_matrix(case: Case, for_cuda: None) -> None:
    model, data = case.model(), poisoned(case)
    loss = case.loss_fn(model)
    grads = oracle.loop_grads(model, loss, data, batch_dim=case.dims)[1]
    bound = oracle.norms(others(grads)).mean().item()  # of two samples one is clipped
    step = psg_fx.transform(model, loss, quantities=ClippedSum(bound), backend="eager", batch_dim=case.dims)
    out = step(data)
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(others(grads), bound)) < tolerance_of(case)
    left_out = ~oracle.norms(grads).isfinite()
    assert torch.equal(out.clip_factors == 0, left_out)
    assert torch.equal(out.norms.isfinite(), ~left_out)


SIZES: dict[str, dict[str, Any]] = {
    "simplecnn": {"image": 12},
    "resnet18gn": {"blocks": (1, 1), "width": 8, "groups": 4, "image": 8},
    "vit": {"layers": 1, "width": 32, "heads": 2, "image": 16, "patch": 4},
    "mlp": {},
}


KEPT = ("simplecnn", "resnet18gn", "vit")
"""Models of which some gradients are products that are kept."""


def example(name: str) -> zoo.Example:
    ex = zoo.example(name, batch=5, **SIZES[name])
    ex.inputs[BAD] = torch.inf
    return ex


@pytest.fixture
def without_launches(monkeypatch: pytest.MonkeyPatch, for_cuda: None) -> None:
    """Nothing is so small that it is better summed side by side; what is stored is summed by psg_fx's op, and products
    are stored.
    """
    table = replace(rates.H100, launch=1e-12, extra={**rates.H100.extra, "filled": 0.0})
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: table)
    monkeypatch.setattr(Settings, "compiles_kernels", lambda *_: True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), one_in(2, itertools.product(SIZES, [{}, {"per": "parameter"}, {"style": "automatic"}]))
)
def test_models(name: str, options: dict[str, str], without_launches: None) -> None:
    ex = example(name)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(0.5, **options), backend="eager")
    out, rest = step(ex.inputs, ex.targets), [0, 2, 3, 4]
    want = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(0.5, **options), backend="eager")(
        ex.inputs[rest], ex.targets[rest]
    )
    assert oracle.worst_error(out.clipped_sum, want.clipped_sum) < 2e-5
    ops = {str(node.target) for node in step.graphs["tidied"].graph.nodes}
    assert ("psg_fx.weighted_sums.default" in ops) == (name in KEPT)
    factors = out.clip_factors if isinstance(out.clip_factors, dict) else {"": out.clip_factors}
    assert all(of[BAD] == 0 and (of[rest] > 0).all() for of in factors.values())


def test_a_weight_that_is_not_finite(without_launches: None) -> None:
    ex, rest = example("mlp"), [0, 2, 3, 4]
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(0.5, weighted=True), backend="eager")
    weights = torch.tensor([1.0, torch.nan, 0.5, 2.0, 1.0])
    found = step(ex.inputs, ex.targets, weights=weights).clipped_sum
    want = step(ex.inputs[rest], ex.targets[rest], weights=weights[rest]).clipped_sum
    assert oracle.worst_error(found, want) < 2e-5


def test_other_sums_are_what_arithmetic_makes_of_them(without_launches: None) -> None:
    """A weight of 0 leaves a sample out of a clipped sum alone; sums of both kinds are written by the kernel's op."""
    ex = example("mlp")
    step = psg_fx.transform(
        ex.model, ex.loss_fn, quantities=[ClippedSum(0.5), WeightedSum()], backend="eager", dynamic=False
    )
    weights = torch.ones(5)
    weights[BAD] = 0
    out = step(ex.inputs, ex.targets, weights=weights)
    assert all(value.isfinite().all() for value in out.clipped_sum.values())
    assert any(value.isnan().any() for value in out.weighted_sum.values())


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("dtype", weighted_sums.DTYPES, ids=str)
def test_the_op_alone(dtype: torch.dtype, leave_out: bool) -> None:
    torch.manual_seed(0)
    weights, values = torch.tensor([0.5, 0.0, -2.0]), [torch.randn(3, 7).to(dtype) for _ in range(3)]
    if leave_out:
        for value in values:
            value[1] = torch.nan
    rows = [0, 2]
    found = weighted_sums.weighted_sums(weights, values, leave_out)
    for got, value in zip(found, values, strict=True):
        assert oracle.relative_error(got, weights[rows].double() @ value[rows].double()) < 1e-6
        assert got.dtype is torch.float32
    torch.library.opcheck(
        weighted_sums.overload(), (weights, values, leave_out), test_utils=("test_schema", "test_faketensor")
    )
