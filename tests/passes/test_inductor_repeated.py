"""Strides found by difference are those that inductor finds."""

from __future__ import annotations

import pytest
import sympy
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from psg_fx.torch_private.repeated import difference, strides_by_difference

X, Y, S = sympy.symbols("x0 x1 s0", integer=True, nonnegative=True)
FOUND = [
    X, X + 512 * Y + 256, 8 * (X + 3 * Y), S * X + Y, 3 * Y, sympy.Integer(7), X * (S + 2) - 4 * X,
    X + 4 * FloorDiv(Y, 3), FloorDiv(S, 2) * X + ModularIndexing(Y, 2, 5),
    128 * FloorDiv(X, 32) + Y, FloorDiv(X, 8), ModularIndexing(X, 1, 16) + Y, 3 * ModularIndexing(X, 16, 4) + 2 * X,
    4096 * ModularIndexing(X, 1, 32) + 128 * FloorDiv(X, 32) + Y,
]  # fmt: skip
LEFT = [
    X * X, FloorDiv(X, 4), ModularIndexing(X, 1, 12), ModularIndexing(X, 3, 8), FloorDiv(X + Y, 8), X * FloorDiv(X, 8),
    ModularIndexing(X + Y, 1, 16),
]  # fmt: skip


@pytest.mark.parametrize("index", FOUND, ids=str)
def test_the_same(index: sympy.Expr) -> None:
    found = difference(index, X, 8)
    assert found is not None
    assert sympy.expand(found - cpp.stride_at_vec_range(index, X, 8)) == 0


@pytest.mark.parametrize("index", LEFT, ids=str)
def test_left_to_inductor(index: sympy.Expr) -> None:
    assert difference(index, X, 8) is None
    want = cpp.stride_at_vec_range(index, X, 8)
    with strides_by_difference():
        assert cpp.stride_at_vec_range(index, X, 8) == want


def test_quotients_have_strides_within_vectors_alone() -> None:
    assert difference(FloorDiv(X, 8) + Y, X) is None
    assert difference(FloorDiv(Y, 8) + 3 * X, X) == 3
