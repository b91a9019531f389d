"""Every row and every quantity, against a float64 loop over single samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import psg_fx
from cases import CASES, Case
from psg_fx import ClippedSum, Grads, MeanGrad, Norms, WeightedSum

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]

BOUND = 0.7
"""Of the median norm: some samples are clipped and some are not."""

ROWS = {case.name: case for case in CASES}
FEW = [
    "linear/2d", "linear/seq", "linear/folded-time-major", "matmul/batched", "einsum/heads", "bilinear", "conv1d/plain",
    "conv2d/groups", "conv2d/depthwise", "conv2d/folded-windows",
    "conv_transpose1d/stride", "embedding/padding", "embedding/tied-head", "embedding/position-table", "layer_norm/seq",
    "group_norm/2d", "batch_norm/eval-images", "mul/column", "expand/class-token", "prefix/qkv-chunks",
    "prefix/weight-norm", "uses/straight-and-transposed", "uses/unused", "layers/lstm",
]  # fmt: skip


class Truth:
    """What a row's quantities should be."""

    def __init__(self, case: Case) -> None:
        model = case.model()
        self.losses, self.grads = oracle.loop_grads(model, case.loss_fn(model), case.data(), batch_dim=case.dims)
        self.norms = oracle.norms(self.grads)
        self.own = oracle.parameter_norms(self.grads)
        self.bound = BOUND * self.norms.median().item()
        self.weights = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)

    def expected(self, field: str, quantity: Any) -> Tensor | dict[str, Tensor]:
        per = getattr(quantity, "per", "model")
        if field == "grads":
            return self.grads
        if field == "norms":
            found = dict(self.own) if per == "parameter" else {"": self.norms}
            squared = getattr(quantity, "squared", False)
            found = {n: v.square() if squared else v for n, v in found.items()}
            return found if per == "parameter" else found[""]
        if field == "mean_grad":
            return oracle.mean_grad(self.grads)
        if field == "weighted_sum":
            return oracle.weighted_sum(self.grads, self.weights)
        norms = self.own if per == "parameter" else dict.fromkeys(self.grads, self.norms)
        limit = quantity.max_norm
        bounds = limit if isinstance(limit, Mapping) else dict.fromkeys(self.grads, limit)
        factors = {
            n: bounds[n] / (v + 0.01) if quantity.style == "automatic" else oracle.clip_factors(v, float(bounds[n]))
            for n, v in norms.items()
        }
        if field == "clip_factors":
            return factors if per == "parameter" else next(iter(factors.values()))
        assert field == "clipped_sum"
        return {n: oracle.weighted_sum({n: g}, factors[n])[n] for n, g in self.grads.items()}


def compare(out: Any, truth: Truth, quantities: list[Any], tolerance: float) -> None:
    """Every field of the output that a quantity fills."""
    assert oracle.relative_error(out.losses, truth.losses) < tolerance, "losses"
    for quantity in quantities:
        fields = [quantity.field]
        if quantity.field == "clipped_sum":
            fields += ["clip_factors"] + (["norms"] if not any(q.field == "norms" for q in quantities) else [])
        for field in fields:
            got, want = getattr(out, field), truth.expected(field, quantity)
            if isinstance(want, dict):
                assert list(got) == list(want), field
                error = oracle.worst_error(got, want)
            else:
                error = oracle.relative_error(got, want)
            assert error < tolerance, f"{field} of {quantity}: relative error {error:.2e}"


def run(case: Case, quantities: list[Any], dtype: torch.dtype = torch.float64) -> Any:
    model = case.model(dtype)
    loss = case.loss_fn(model)
    step = psg_fx.transform(model, loss, quantities=quantities, backend="eager", batch_dim=case.dims)
    given = {}
    if any(isinstance(q, WeightedSum) for q in quantities):
        given["weights"] = torch.tensor([0.5, -2.0, 3.0], dtype=dtype)
    return step(case.data(dtype), **given)


def everything(truth: Truth) -> list[Any]:
    return [Grads(), Norms(), ClippedSum(truth.bound), WeightedSum(), MeanGrad()]


def tolerance_of(case: Case) -> float:
    return 1e-5 if case.name == "prefix/float32-cast" else 1e-10


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    """All quantities at once, at a batch size that the graph was not traced with."""
    if case.refused:
        with pytest.raises(ValueError, match=case.refused):
            run(case, [Grads()])
        return
    truth = Truth(case)
    quantities = everything(truth)
    compare(run(case, quantities), truth, quantities, tolerance_of(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.vmap], ids=str)
def test_vmap_agrees(case: Case) -> None:
    """The oracle itself, against a second opinion."""
    truth = Truth(case)
    model = case.model()
    losses, grads = oracle.vmap_grads(model, case.loss_fn(model), case.data(), batch_dim=case.dims)
    assert oracle.relative_error(losses, truth.losses) < tolerance_of(case)
    assert oracle.worst_error(grads, truth.grads) < tolerance_of(case)


SETS = {
    "grads": lambda t: [Grads()],
    "norms": lambda t: [Norms()],
    "squared-norms": lambda t: [Norms(squared=True)],
    "norms-per-parameter": lambda t: [Norms(per="parameter")],
    "clipped": lambda t: [ClippedSum(t.bound)],
    "automatic": lambda t: [ClippedSum(t.bound, style="automatic")],
    "clipped-per-parameter": lambda t: [ClippedSum(t.bound, per="parameter")],
    "clipped-by-name": lambda t: [
        Norms(), ClippedSum({n: 0.5 * float(v.median()) for n, v in t.own.items()}, per="parameter", style="abadi")
    ],
    "automatic-per-parameter": lambda t: [ClippedSum(t.bound, per="parameter", style="automatic")],
    "tensor-bound": lambda t: [ClippedSum(torch.tensor(t.bound, dtype=torch.float64))],
    "weighted": lambda t: [WeightedSum()],
    "mean": lambda t: [MeanGrad()],
    "mean-and-norms": lambda t: [MeanGrad(), Norms()],
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("row", FEW[::3])
def test_set(row: str, name: str) -> None:
    """Each quantity alone and in every setting, on a few rows."""
    truth = Truth(ROWS[row])
    quantities = SETS[name](truth)
    compare(run(ROWS[row], quantities), truth, quantities, 1e-10)


@pytest.mark.parametrize("row", FEW)
def test_float32(row: str) -> None:
    truth = Truth(ROWS[row])
    quantities = everything(truth)
    compare(run(ROWS[row], quantities, torch.float32), truth, quantities, 2e-5)
