"""Ops in forms that are rarely written: bounds beyond a dim, instance norm by batch norm, matrices of more dims."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import psg_fx
from support.programs import Program, square

X = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))


def instance_norm(x: Tensor, w: Tensor) -> Tensor:
    """Of the data themselves: their gradient is not asked for, and torch gives it."""
    rows = x.reshape(1, -1, 5)
    return (
        F.batch_norm(rows, None, None, w[:, 0].repeat(x.shape[0]), w[:, 1].repeat(x.shape[0]), True).view_as(x)
        * w[:, :1]
    )


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "from before the start": lambda x, w: (x * w)[-2 * x.shape[0] :],
    "from the start": lambda x, w: (x * w)[-x.shape[0] :],
    "the first of two": lambda x, w: torch.cat([x * w, x])[-3 * x.shape[0] : -x.shape[0]],
    "instance norm": instance_norm,
    "a matrix with more dims": lambda x, w: torch.linalg.solve_ex(w[:, :, None] + 3 * torch.eye(5), x[:, 0].T)[0].mT,
}


def test_places_that_are_listed_and_read_elsewhere_are_refused() -> None:
    def of_places(x: Tensor, w: Tensor) -> Tensor:
        b, j = torch.where(x[..., 0] > 0)
        out = x.clone()
        out[b, j] = out[b, j] + x[b, j] * w[j]
        return out

    step = psg_fx.transform(Program(of_places, w=(3, 5)), square, backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match=r"aten\.where cannot be shown to keep samples apart"):
        step(X)


@pytest.mark.parametrize("name", FORMS)
def test_exact(name: str) -> None:
    torch.manual_seed(0)
    step = psg_fx.transform(Program(FORMS[name], w=(3, 5)), square, backend="eager")
    report = step.validate(X)
    assert report.ok, report
