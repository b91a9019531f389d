"""Every row and every quantity, against a float64 loop over single samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum  # fmt: skip
from psg_fx.quantities.names import KINDS
from psg_fx.reference.definitions import definitions_for
from support import oracle
from support.answered import check_answers
from support.cases import CASES, Case
from support.expected import Truth, directions, tolerance_of
from support.rows import ROWS, answered, everything, in_one_process
from support.selection import one_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]

FEW = [
    "linear/2d", "linear/seq", "linear/folded-time-major", "matmul/batched", "einsum/heads", "bilinear", "conv1d/plain",
    "conv2d/groups", "conv2d/depthwise", "conv2d/folded-windows",
    "conv_transpose1d/stride", "embedding/padding", "embedding/tied-head", "embedding/position-table", "layer_norm/seq",
    "group_norm/2d", "batch_norm/eval-images", "mul/column", "expand/class-token", "prefix/qkv-chunks",
    "prefix/weight-norm", "uses/straight-and-transposed", "uses/unused", "layers/lstm",
]  # fmt: skip


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
                assert all(value.is_contiguous() for value in got.values()), field
                error = oracle.worst_error(got, want)
            else:
                error = oracle.relative_error(got, want)
            assert error < tolerance, f"{field} of {quantity}: relative error {error:.2e}"


def run(case: Case, quantities: list[Any], dtype: torch.dtype = torch.float64) -> Any:
    model = case.model(dtype)
    loss = case.loss_fn(model)
    step = psg_fx.transform(model, loss, quantities=quantities, backend="eager", batch_dim=case.dims)
    given = {}
    if any("weights" in q.reads for q in quantities):
        given["weights"] = torch.tensor([0.5, -2.0, 3.0], dtype=dtype)
    if any(isinstance(q, Dots) for q in quantities):
        like = {n: p.detach()[None] for n, p in oracle.tracked(model, None).items()}
        (count,) = [q.count for q in quantities if isinstance(q, Dots)]
        given["directions"] = {n: v.to(dtype) for n, v in directions(like, count).items()}
    return step(case.data(dtype), **given)


@pytest.mark.parametrize("case", in_one_process(CASES, ROWS))
def test_row(case: Case) -> None:
    """All quantities at once, at a batch size that the graph was not traced with, by the row's own rules."""
    if case.refused:
        with pytest.raises(ValueError, match=case.refused):
            run(case, [Grads()])
        return
    found = answered(case.name)
    compare(found.out, found.truth, found.quantities, tolerance_of(case))
    check_answers(case, found.step)


@pytest.mark.parametrize("case", one_in(4, [case for case in CASES if case.vmap]))
def test_vmap_agrees(case: Case) -> None:
    """The oracle itself, against a second opinion."""
    truth = Truth(case)
    model = case.model()
    losses, grads = oracle.vmap_grads(model, case.loss_fn(model), case.data(), batch_dim=case.dims)
    assert oracle.relative_error(losses, truth.losses) < tolerance_of(case)
    assert oracle.worst_error(grads, truth.grads) < tolerance_of(case)


def kinds(kind: type[psg_fx.Quantity] = psg_fx.Quantity) -> Iterator[type[psg_fx.Quantity]]:
    """Every quantity of the package."""
    for sub in kind.__subclasses__():
        if sub.__module__.startswith("psg_fx."):
            yield sub
        yield from kinds(sub)


@pytest.mark.parametrize("kind", dict.fromkeys(kinds()), ids=lambda k: k.__name__)
def test_every_quantity_is_public_checked_and_has_a_name(kind: type[psg_fx.Quantity]) -> None:
    assert kind.__name__ in psg_fx.__all__
    assert getattr(psg_fx, kind.__name__) is kind
    assert KINDS.get(kind.field) is kind, "the command line has no name for it"
    (asked,) = [made for made in ASKED if type(made) is kind]
    given = {"weights": torch.ones(3), "directions": {"w": torch.ones(4)}}
    checks, notes = definitions_for([asked], given)
    assert not notes, "step.validate has no definition of it"
    assert asked.field in {check.field for check in checks}
    grads = {"w": torch.randn(3, 4)}
    for check in checks:
        check.expected(torch.ones(3), grads)


ASKED = [
    Grads(), Norms(), ClippedSum(1.0), WeightedSum(), MeanGrad(), Dots(), Gram(), SecondMoment(), Projection(rank=2)
]  # fmt: skip


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
    "clipped-and-weighted": lambda t: [ClippedSum(t.bound, weighted=True), WeightedSum()],
    "mean": lambda t: [MeanGrad()],
    "mean-and-norms": lambda t: [MeanGrad(), Norms()],
    "dots": lambda t: [Dots()],
    "dots-several": lambda t: [Dots(count=4)],
    "gram": lambda t: [Gram()],
    "second-moment": lambda t: [SecondMoment()],
    "variance": lambda t: [SecondMoment(centered=True)],
    "projection": lambda t: [Projection(rank=2, seed=1)],
    "all": lambda t: [*everything(t), Dots(count=2), Gram(), SecondMoment(), Projection(rank=3)],
}  # fmt: skip


SET_ROWS = ("conv2d/folded-windows", "embedding/tied-head", "uses/straight-and-transposed")
"""Patches, rows of a table that is also a matrix, and cross terms of two uses."""


TAKEN = {f"{SET_ROWS[k % len(SET_ROWS)]}-{name}" for k, name in enumerate(SETS)}
PAIRS = [(row, name) for name in SETS for row in SET_ROWS]


@pytest.mark.parametrize(("row", "name"), one_in(len(PAIRS), PAIRS, always=TAKEN, kinds=False))
def test_set(row: str, name: str) -> None:
    """Each quantity alone and in every setting, on one of a few rows, in turn."""
    truth = Truth(ROWS[row])
    quantities = SETS[name](truth)
    compare(run(ROWS[row], quantities), truth, quantities, 1e-10)


@pytest.mark.rest
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("row", [row for row in FEW[::3] if row not in SET_ROWS])
def test_set_of_further_rows(row: str, name: str) -> None:
    test_set(row, name)


@pytest.mark.parametrize("row", one_in(6, FEW, kinds=False))
def test_float32(row: str) -> None:
    truth = Truth(ROWS[row])
    quantities = everything(truth)
    compare(run(ROWS[row], quantities, torch.float32), truth, quantities, 2e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_directions_may_lie_in_memory_as_they_like(backend: str) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    given = {"weight": torch.randn(5, 3, 2).transpose(1, 2), "bias": torch.randn(2, 5).T}
    step = psg_fx.transform(model, lambda out: out.square().sum(1), quantities=Dots(count=5), backend=backend)
    flat_copies = {name: value.contiguous() for name, value in given.items()}
    torch.testing.assert_close(step(x, directions=given).dots, step(x, directions=flat_copies).dots, rtol=0, atol=0)


@pytest.mark.parametrize(("bound", "same"), [(Fraction(1, 8), 0.125), (10**30, 1e30), (1e300, math.inf)], ids=str)
def test_a_bound_is_any_real_number(bound: Any, same: float) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    for per, given in (("model", bound), ("parameter", bound), ("parameter", {"weight": bound, "bias": bound})):
        step, other = (
            psg_fx.transform(model, lambda out: out.square().sum(1), quantities=ClippedSum(b, per), backend="eager")
            for b in (given, same)
        )
        torch.testing.assert_close(step(x).clipped_sum, other(x).clipped_sum, rtol=0, atol=0)
        assert step.validate(x).ok
