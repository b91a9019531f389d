"""Between which numbers values lie: a logarithm of what is more than a positive number is finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.graph.ranges import Range, range_of

NONE = (-math.inf, math.inf)
VALUES = torch.tensor([-1e30, -3.0, -1e-9, 0.0, 1e-9, 0.3, 1.0, 3.0, 1e30])

CASES: dict[str, tuple[Callable[[Tensor], Tensor], Range]] = {
    "anything": (lambda x: x * 2, NONE),
    "clamped": (lambda x: x.clamp(-1, 2), (-1.0, 2.0)),
    "from below": (lambda x: x.clamp(min=0.5), (0.5, math.inf)),
    "from above": (lambda x: x.clamp_max(0.5).t(), (-math.inf, 0.5)),
    "twice": (lambda x: x.sigmoid().clamp(0.1, 3), (0.1, 1.0)),
    "bounds that cross": (lambda x: x.clamp(5, 2), (2.0, 2.0)),
    "seen otherwise": (lambda x: x.abs()[1:].reshape(2, 4).double(), (0.0, math.inf)),
    "by a tensor": (lambda x: x.clamp(min=x), NONE),
    "of what has no end": (lambda x: x.exp() + 1, NONE),
}


def last(f: Callable[[Tensor], Tensor], x: Tensor) -> torch.fx.Node:
    graph = make_fx(f, tracing_mode="fake")(x).graph
    return next(node for node in graph.nodes if node.op == "output").args[0]  # type: ignore[return-value]


@pytest.mark.parametrize("name", CASES)
def test_ranges(name: str) -> None:
    f, expected = CASES[name]
    assert range_of(last(f, VALUES)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [1e-4, 1e-9])
def test_what_is_left_of_one_is_rounded(dtype: torch.dtype, least: float) -> None:
    x = VALUES.to(dtype)

    def rest(x: Tensor) -> Tensor:
        return 1 - x.sigmoid().clamp(least, 1 - least)

    low, high = range_of(last(rest, x))
    found = rest(x)
    assert low <= found.min()
    assert found.max() <= high
    if not (found > 0).all():
        assert low <= 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_bound_that_is_none_in_the_dtype(dtype: torch.dtype) -> None:
    low, _ = range_of(last(lambda x: x.clamp(min=1e-12), VALUES.to(dtype)))
    assert (low > 0) == (dtype != torch.float16)
