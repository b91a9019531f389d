"""Every row of the matrix on a CUDA device, against a float64 loop over single samples there."""

from __future__ import annotations

from typing import Any

import pytest

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum
from support import oracle
from support.cases import CASES, Case
from support.device import CUDA, moved
from support.expected import Truth, directions, tolerance_of

pytestmark = [*CUDA, pytest.mark.rest]

ROWS = [case for case in CASES if not case.refused]


def agrees(case: Case, backend: str) -> None:
    """All quantities at once; to rounding, or to what the device's own kernels differ by from the CPU's in float64."""
    try:
        truth = Truth(case, "cuda")
    except RuntimeError as error:
        pytest.skip(f"the program itself does not run there: {error}")
    model, data = case.model().to("cuda"), moved(case.data())
    loss = case.loss_fn(model)
    asked = [
        Grads(), Norms(), ClippedSum(truth.bound), WeightedSum(), MeanGrad(), Dots(count=2), Gram(), SecondMoment(),
        Projection(rank=3),
    ]  # fmt: skip
    step = psg_fx.transform(model, loss, quantities=asked, backend=backend, batch_dim=case.dims)
    like = {n: p.detach()[None] for n, p in oracle.tracked(model, None).items()}
    given: dict[str, Any] = {"weights": truth.weights.cuda(), "directions": moved(directions(like, 2))}
    out = step(data, **given)
    errors = {"losses": oracle.relative_error(out.losses, truth.losses)}
    for quantity in asked:
        got, want = getattr(out, quantity.field), truth.expected(quantity.field, quantity)
        if isinstance(want, dict):
            got = {name: value.cpu() for name, value in got.items()}
            errors[quantity.field] = oracle.worst_error(got, want)
        else:
            errors[quantity.field] = oracle.relative_error(got, want)
    allowed = max(tolerance_of(case), 10 * oracle.relative_error(truth.losses, Truth(case).losses))
    wrong = {field: error for field, error in errors.items() if not error < allowed}
    assert not wrong


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_eager(case: Case) -> None:
    agrees(case, "eager")


@pytest.mark.inductor
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", ROWS[::8], ids=str)
def test_inductor(case: Case) -> None:
    agrees(case, "inductor")
