"""Strides found by difference are those that inductor finds."""

from __future__ import annotations

import pytest
import sympy
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from psg_fx.torch_private.repeated import difference, strides_by_difference

X, Y, S = sympy.symbols("x0 x1 s0", integer=True, nonnegative=True)
FOUND = [X, X + 512 * Y + 256, 8 * (X + 3 * Y), S * X + Y, 3 * Y, sympy.Integer(7), X * (S + 2) - 4 * X]
LEFT = [FloorDiv(X, 8), ModularIndexing(X, 1, 16) + Y, X * X]


@pytest.mark.parametrize("index", FOUND, ids=str)
def test_the_same(index: sympy.Expr) -> None:
    found = difference(index, X)
    assert found is not None
    assert sympy.expand(found - cpp.stride_at_vec_range(index, X, 8)) == 0


@pytest.mark.parametrize("index", LEFT, ids=str)
def test_left_to_inductor(index: sympy.Expr) -> None:
    assert difference(index, X) is None
    want = cpp.stride_at_vec_range(index, X, 8)
    with strides_by_difference():
        assert cpp.stride_at_vec_range(index, X, 8) == want
