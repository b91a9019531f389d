"""What is added to a tensor of one element is added once for each element, by the kernels that inductor writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from psg_fx.torch_private.scattered import scattered_in_place
from support.device import CUDA

pytestmark = [*CUDA, pytest.mark.inductor, pytest.mark.usefixtures("fresh_compiler")]


def alone(x: Tensor, ids: Tensor) -> Any:
    """A kernel of one dim, whose block is longer than there are elements."""
    return x.new_zeros(1).index_add(0, ids, x.flatten().exp()), x.new_zeros(1).index_add(0, ids, x.new_ones(x.numel()))


def beside_a_mean(x: Tensor, ids: Tensor) -> Any:
    """In the loop of a reduction."""
    return x.mean(), *alone(x, ids)


def beside_rows(x: Tensor, ids: Tensor) -> Any:
    """In a kernel of two dims."""
    return x.softmax(1), *alone(x, ids)


@pytest.mark.parametrize("sums", [alone, beside_a_mean, beside_rows])
@pytest.mark.parametrize("shape", [(1, 3), (7, 33), (3, 700)])
def test_sums_into_one_place(sums: Callable[..., Any], shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, dtype=torch.float64, device="cuda")
    ids = torch.zeros(x.numel(), dtype=torch.int64, device="cuda")
    with scattered_in_place():
        found = torch.compile(sums, fullgraph=True)(x, ids)
    torch.testing.assert_close(found, sums(x, ids))
