"""Convolutions of float32 by a unit that multiplies bfloat16, and gradients of weights, are float32's at any size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx.ops.products import convolutions_in_parts as parts
from psg_fx.ops.products.convolutions_in_parts import convolution_in_parts, weight_gradients_in_parts
from psg_fx.torch_private import native
from psg_fx.torch_private.matrix_unit import has_matrix_unit

pytestmark = pytest.mark.skipif(not has_matrix_unit(), reason="this processor has no matrix unit")

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    samples: int
    channels: int
    outputs: int
    space: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...] = (1, 1)

    @property
    def window(self) -> tuple[list[int], list[int]]:
        return list(self.padding), list(self.dilation)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, w, bias, and a cotangent."""
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(self.outputs, self.channels, *self.kernel, generator=generator)
        x = torch.randn(self.samples, self.channels, *self.space, generator=generator)
        bias = torch.randn(self.outputs, generator=generator)
        y = convolution(x, w, bias, self)
        return x, w, bias, torch.randn(y.shape, generator=generator)


CASES = {
    "one pixel": Case(1, 1, 1, (1, 1), (1, 1), (0, 0)),
    "a tile": Case(2, 32, 16, (4, 4), (1, 1), (0, 0)),
    "rows shorter than a vector": Case(3, 33, 50, (11, 11), (5, 5), (2, 2)),
    "rows longer than a vector": Case(3, 20, 40, (9, 35), (3, 3), (1, 1)),
    "rows of a vector": Case(5, 32, 32, (8, 16), (3, 3), (1, 1)),
    "without zeros around": Case(4, 32, 64, (26, 26), (3, 3), (0, 0)),
    "as wide as the kernel": Case(4, 40, 24, (5, 3), (5, 3), (0, 0)),
    "zeros around on one side": Case(2, 17, 19, (6, 20), (1, 3), (0, 1)),
    "only zeros around": Case(2, 5, 7, (2, 2), (3, 3), (3, 3)),
    "even kernel": Case(2, 36, 20, (10, 12), (2, 4), (1, 2)),
    "places apart": Case(2, 36, 20, (17, 19), (3, 3), (2, 3), (2, 3)),
    "channels of several stages": Case(2, 150, 70, (6, 6), (3, 3), (1, 1)),
    "rows in pieces": Case(1, 64, 33, (70, 40), (3, 3), (1, 1)),
    "rows in many pieces": Case(2, 96, 64, (128, 33), (3, 3), (1, 1)),
    "fewer rows than pieces": Case(1, 40, 33, (3, 50), (3, 3), (1, 1)),
    "more samples than threads": Case(13, 34, 18, (7, 7), (3, 3), (1, 1)),
    "sequences": Case(3, 48, 40, (50,), (5,), (2,), (1,)),
}


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    return (F.conv2d if len(case.space) == 2 else F.conv1d)(x, w, bias, padding=case.padding, dilation=case.dilation)


def gradients(g: Tensor, x: Tensor, w: Tensor, case: Case, mask: list[bool]) -> tuple[Tensor, Tensor]:
    ones, zeros = [1] * len(case.space), [0] * len(case.space)
    x_grad, w_grad, _ = aten.convolution_backward(g, x, w, None, ones, *case.window, False, zeros, 1, [*mask, False])
    return x_grad, w_grad


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    for name in (parts.CONVOLUTION, parts.WEIGHT_GRADIENTS):
        native.begin(name)
    native.finish()
    assert native.library(parts.CONVOLUTION) is not None
    assert native.library(parts.WEIGHT_GRADIENTS) is not None


@pytest.fixture
def by_the_unit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would compute in its place fails."""

    def never(*arguments: object) -> Tensor:
        raise AssertionError("the unit was not believed")

    monkeypatch.setattr(parts, "_by_torch", never)
    monkeypatch.setattr(parts, "_weight_gradients_by_torch", never)


@pytest.fixture(params=[1, 2, 3], ids="threads {}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    try:
        yield request.param
    finally:
        torch.set_num_threads(before)


def check(found: Tensor, of_torch: Tensor, exact: Tensor) -> None:
    """No less exact than torch's, in the mean, but for three roundings; no entry is much worse."""
    assert found.shape == exact.shape
    assert found.is_contiguous()
    errors = [(value.double() - exact).abs() for value in (found, of_torch)]
    assert errors[0].norm() <= max(1.1 * errors[1].norm(), 1.8e-7 * exact.norm())
    assert errors[0].max() <= 2 * errors[1].max() + 2e-7 * exact.abs().max()


@pytest.mark.usefixtures("by_the_unit_alone")
@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str, threads: int) -> None:
    case = CASES[name]
    x, w, bias, _ = case.tensors()
    for added in (None, bias):
        exact = convolution(x.double(), w.double(), None if added is None else added.double(), case)
        check(convolution_in_parts(x, w, added, *case.window, False), convolution(x, w, added, case), exact)


@pytest.mark.usefixtures("by_the_unit_alone")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.padding < case.kernel])
def test_gradient_of_the_input(name: str, threads: int) -> None:
    case = CASES[name]
    x, w, _, g = case.tensors()
    exact, _ = gradients(g.double(), x.double(), w.double(), case, [True, False])
    of_torch, _ = gradients(g, x, w, case, [True, False])
    check(convolution_in_parts(g, w, None, *case.window, True), of_torch, exact)


@pytest.mark.usefixtures("by_the_unit_alone")
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_weights(name: str, threads: int) -> None:
    """Of each sample, and of all."""
    case = CASES[name]
    x, w, _, g = case.tensors()
    exact, of_torch = (
        torch.stack([gradients(gb[None], xb[None], wb, case, [False, True])[1] for gb, xb in zip(gs, xs, strict=True)])
        for gs, xs, wb in ((g.double(), x.double(), w.double()), (g, x, w))
    )  # fmt: skip
    flat = (value.reshape(1, -1, *value.shape[2:]) for value in (g, x))
    found = weight_gradients_in_parts(*flat, case.samples, list(case.kernel), *case.window)
    check(found.view(exact.shape), of_torch, exact)
    summed = weight_gradients_in_parts(g, x, 1, list(case.kernel), *case.window)
    check(summed, gradients(g, x, w, case, [False, True])[1], exact.sum(0))


@pytest.mark.usefixtures("by_the_unit_alone")
def test_any_layout() -> None:
    """Of images with channels last, and of weights in any order, turned or with gaps."""
    case = CASES["rows longer than a vector"]
    x, w, bias, g = case.tensors()
    last = torch.channels_last
    expected = convolution_in_parts(x, w, bias, *case.window, False)
    for weights in (
        w.to(memory_format=last),
        w.transpose(0, 1).contiguous().transpose(0, 1),
        F.pad(w, (1, 1))[..., 1:-1],
    ):
        found = convolution_in_parts(x.to(memory_format=last), weights, bias, *case.window, False)
        assert found.is_contiguous()
        assert torch.equal(found, expected)
        gradient = convolution_in_parts(g.to(memory_format=last), weights, None, *case.window, True)
        assert torch.equal(gradient, convolution_in_parts(g, w, None, *case.window, True))
    kernel = list(case.kernel)
    found = weight_gradients_in_parts(g.to(memory_format=last), x.to(memory_format=last), 1, kernel, *case.window)
    assert torch.equal(found, weight_gradients_in_parts(g, x, 1, kernel, *case.window))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max])
def test_what_is_not_finite(value: float) -> None:
    """Then it is torch's, which has as many numbers that are finite."""
    case = CASES["rows longer than a vector"]
    x, w, bias, g = case.tensors()
    x[1, 3, 4, 5] = value
    pairs = [
        (convolution_in_parts(x, w, bias, *case.window, False), convolution(x, w, bias, case)),
        (
            weight_gradients_in_parts(g, x, 1, list(case.kernel), *case.window),
            gradients(g, x, w, case, [False, True])[1],
        ),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert found.isfinite().sum() == expected.isfinite().sum()


@pytest.mark.parametrize("exponents", [(-60, -30), (-60, -60), (-118, 0), (0, -124), (60, 50)], ids=str)
def test_sizes_of_numbers(exponents: tuple[int, int]) -> None:
    case = CASES["without zeros around"]
    x, w, _, g = case.tensors()
    x, w, g = x * 2.0 ** exponents[0], w * 2.0 ** exponents[1], g * 2.0 ** exponents[1]
    exact = convolution(x.double(), w.double(), None, case)
    check(convolution_in_parts(x, w, None, *case.window, False), convolution(x, w, None, case), exact)
    (_, exact), (_, of_torch) = (
        gradients(*map(to, (g, x, w)), case, [False, True]) for to in (Tensor.double, Tensor.clone)
    )
    check(weight_gradients_in_parts(g, x, 1, list(case.kernel), *case.window), of_torch, exact)


def test_what_the_unit_does_not_compute() -> None:
    """No samples, no pixels, and zeros around that a gradient would have to leave out."""
    case = CASES["only zeros around"]
    x, w, bias, g = case.tensors()
    expected, _ = gradients(g, x, w, case, [True, False])
    torch.testing.assert_close(convolution_in_parts(g, w, None, *case.window, True), expected)
    none = convolution_in_parts(x[:0], w, bias, *case.window, False)
    assert none.shape == (0, *convolution(x, w, bias, case).shape[1:])
    assert not weight_gradients_in_parts(g[:0], x[:0], 1, [3, 3], *case.window).any()


@pytest.mark.usefixtures("by_the_unit_alone")
def test_zeros() -> None:
    case = CASES["a tile"]
    x, w, _, _ = case.tensors()
    assert not convolution_in_parts(x * 0, w, None, *case.window, False).any()


@pytest.mark.usefixtures("by_the_unit_alone")
def test_the_number_of_threads_is_not_seen() -> None:
    """It says who computes what, not what is computed; sums over samples are added up by whoever computes them."""
    threads, found = torch.get_num_threads(), []
    case = CASES["more samples than threads"]
    x, w, bias, g = case.tensors()
    flat = [value.reshape(1, -1, *value.shape[2:]) for value in (g, x)]
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            y = convolution_in_parts(x, w, bias, *case.window, False)
            found.append((y, weight_gradients_in_parts(*flat, case.samples, list(case.kernel), *case.window)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
