"""Code for several threads adds to the places that are meant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.torch_private.scattered import scattered_in_place
from support import oracle

pytestmark = [pytest.mark.inductor, pytest.mark.usefixtures("fresh_compiler", "_two_threads")]


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def across(a: Tensor, b: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Operands whose dims lie in memory one way and the other way round, and a sum along one of them by number."""
    t = a * b.t()
    return t, t.new_zeros(ids.shape[0], a.shape[0]).index_add(0, ids, t.t())


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.rest), True])
def test_a_sum_by_number_in_tiles(dynamic: bool) -> None:
    """Those that are written twice too far would be among the places that nobody adds to."""
    a, b = torch.randn(24, 40, dtype=torch.float64), torch.randn(40, 24, dtype=torch.float64)
    ids = torch.randint(10, (40,))
    with scattered_in_place():
        found = torch.compile(across, dynamic=dynamic)(a, b, ids)
    torch.testing.assert_close(found, across(a, b, ids))


@pytest.mark.slow
def test_what_is_added_to_is_read_afterwards() -> None:
    """Gradients of an interpolation are added up from zeros, which are memory that is needed early."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 3, 1)).double()
    x = torch.randn(3, 16, 8, 8, dtype=torch.float64).to(memory_format=torch.channels_last)

    def loss(output: Tensor) -> Tensor:
        return nn.functional.interpolate(output, size=(32, 32), mode="bilinear").square().mean()

    _, grads = oracle.loop_grads(model, loss, x)
    out = psg_fx.transform(model, loss, dynamic=True)(x)
    assert oracle.worst_error(out.grads, grads) < 1e-12
