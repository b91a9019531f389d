"""Products of float32 by a unit that multiplies bfloat16 are float32's: no less exact than the BLAS's, at any size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from psg_fx.ops.products import in_parts as parts
from psg_fx.ops.products.in_parts import in_parts
from psg_fx.torch_private import native
from psg_fx.torch_private.matrix_unit import has_matrix_unit

pytestmark = pytest.mark.skipif(not has_matrix_unit(), reason="this processor has no matrix unit")

SIZES = [
    (1, 1, 1), (16, 32, 16), (17, 33, 18), (32, 64, 32), (33, 31, 65), (100, 70, 50), (700, 33, 65), (65, 33, 700),
    (40, 1000, 600), (600, 300, 40), (20, 390, 1100),
]  # fmt: skip
"""m, k, n: less and more than a tile, a block, a band, and what is packed at once."""


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    native.begin(parts.LIBRARY)
    native.finish()
    assert native.library(parts.LIBRARY) is not None


def of_size(m: int, n: int, turned: bool, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, m, generator=generator).t() if turned else torch.randn(m, n, generator=generator)


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """The largest one and the mean, relative to what a product of such rows and columns is made of."""
    error = (found.double() - exact).abs()
    return float(error.max() / exact.abs().max()), float(error.norm() / exact.norm())


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    m, k, n = size
    a, b, bias = of_size(m, k, turned[0], 0), of_size(k, n, turned[1], 1), of_size(1, n, False, 2)[0]
    exact = a.double() @ b.double()
    for added, of_torch in ((None, a @ b), (bias, torch.addmm(bias, a, b))):
        wanted = exact if added is None else exact + added.double()
        largest, mean = errors(in_parts(a, b, added), wanted)
        of_blas = errors(of_torch, wanted)
        assert mean <= of_blas[1] + 1e-9  # of a single number both may be rounded rightly
        assert largest <= 2 * of_blas[0] + 1e-7


def test_no_less_exact_than_the_blas() -> None:
    """Of many shapes, with numbers of one size and of sizes that differ by six orders."""
    for seed, (m, k, n) in enumerate([(128, 64, 128), (64, 1000, 96), (256, 256, 256), (50, 4000, 40)]):
        for spread in (0, 6):
            a, b = (of_size(*shape, False, seed + i) for i, shape in enumerate([(m, k), (k, n)]))
            scales = torch.logspace(0, -spread, k)
            a, b = a * scales, b * scales.flip(0)[:, None]
            exact = a.double() @ b.double()
            assert errors(in_parts(a, b, None), exact)[1] <= errors(a @ b, exact)[1]


def test_every_bit_counts() -> None:
    """What cancels in float32 leaves what is left of it: all 24 bits of both are multiplied."""
    one = 1 + 2.0**-23
    a = torch.tensor([[one, -1.0] + [0.0] * 30])
    b = torch.tensor([[1.0], [1.0]] + [[0.0]] * 30)
    assert in_parts(a, b, None).item() == 2.0**-23
    assert in_parts(b.t(), a.t(), None).item() == 2.0**-23


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max])
def test_what_is_not_finite(value: float) -> None:
    """Infinity has no parts, and the largest numbers are rounded to it: then the product is torch's."""
    a, b, bias = of_size(40, 40, False, 0), of_size(40, 40, False, 1), of_size(1, 40, False, 2)[0]
    a[3, 5] = value
    b[5, 7] = 0.25
    found, expected = in_parts(a, b, bias), torch.addmm(bias, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found.isfinite().sum() == expected.isfinite().sum()


@pytest.mark.parametrize("exponents", [(-60, -40), (-60, -60), (-118, 0), (0, -124), (60, 60)], ids=str)
def test_sizes_of_numbers(exponents: tuple[int, int]) -> None:
    """Down to 2^-100; the unit takes parts below 2^-126 for zero, so what is smaller is torch's."""
    a, b = (of_size(40, 40, False, i) * 2.0**exponent for i, exponent in enumerate(exponents))
    exact = a.double() @ b.double()
    assert errors(in_parts(a, b, None), exact)[1] < 2e-7


def test_zeros() -> None:
    a = torch.zeros(40, 40)
    assert torch.equal(in_parts(a, a, None), a)


def test_any_number_of_threads() -> None:
    """Whose number says who computes what, not what is computed."""
    a, b = of_size(70, 600, True, 0), of_size(600, 90, False, 1)
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found.append(in_parts(a, b, None))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_views_with_gaps() -> None:
    a, b = of_size(100, 140, False, 0)[3:90, 5:75:2], of_size(80, 120, False, 1)[7:42, 1:117:3]
    largest, _ = errors(in_parts(a, b, None), a.double() @ b.double())
    assert largest < 4e-7
