"""A clipped sum that leaves samples out of a model that draws: of the draws that its norms and factors are of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx

LARGE = 3e38
"""Finite, and not twice: dropout leaves it out, or doubles it."""


class Dropped(nn.Module):
    """The gradient of its weight is its input, half of which is left out, and half doubled."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout(x, 0.5, self.training) * self.weight).sum(1)


def step_of(model: nn.Module, backend: str = "eager") -> psg_fx.PerSampleModule:
    asked = [psg_fx.Grads(), psg_fx.ClippedSum(1.0)]
    return psg_fx.transform(model, lambda out: out, quantities=asked, backend=backend, dynamic=True)


BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [None, [0, 1, 0, 2, -1, 1]])
def test_norms_factors_and_sum_are_of_one_draw(groups: list[int] | None, backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 64)
    x[3, 0] = torch.nan
    step = step_of(Dropped(), backend)
    for _ in range(2):
        torch.manual_seed(1)
        out = step(x) if groups is None else step(x, groups=groups)
        after = torch.get_rng_state()
        kept = out.norms.isfinite()
        assert int((~kept).sum()) == 1
        expected = out.clip_factors[kept] @ out.grads["weight"][kept]
        torch.testing.assert_close(out.clipped_sum["weight"], expected)
        torch.testing.assert_close(out.grads["weight"][kept].norm(dim=1), out.norms[kept])
    torch.manual_seed(1)
    plain = psg_fx.transform(Dropped(), lambda out: out, quantities=psg_fx.Norms(), backend=backend, dynamic=True)
    norms = (plain(x) if groups is None else plain(x, groups=groups)).norms
    if backend == "eager":
        torch.testing.assert_close(norms, out.norms, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), after)  # what is drawn afterwards does not depend on samples left out


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_that_overflow_in_the_place_of_another_do_not_stay_there(backend: str) -> None:
    torch.manual_seed(0)
    x = torch.ones(4, 64)
    x[0], x[1:, 0] = torch.nan, LARGE
    step, finite = step_of(Dropped(), backend), []
    for _ in range(12):
        out = step(x)
        kept = out.norms.isfinite()
        finite.append(int(kept.sum()))
        expected = out.clip_factors[kept] @ out.grads["weight"][kept]
        torch.testing.assert_close(out.clipped_sum["weight"], expected)
    assert len(set(finite)) > 1


def test_where_whatever_stands_in_overflows_it_is_said() -> None:
    class Noisy(Dropped):
        def forward(self, x: Tensor) -> Tensor:
            return (F.dropout(torch.full_like(x, LARGE), 0.5) * self.weight + x).sum(1)

    torch.manual_seed(0)
    step = step_of(Noisy(1))
    for _ in range(4):
        out = None
        with pytest.raises(psg_fx.NotYetSupported, match="or zeros, are in their places"):
            out = step(torch.ones(12, 1))
        assert out is None
