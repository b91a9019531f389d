"""Patches are never built where that is not needed: what the methods for them compute, and when they apply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.algebra.gradient import GRADIENTS
from psg_fx.algebra.network import Dense, Patches
from psg_fx.planner.methods import METHODS, Arg, Pair
from psg_fx.planner.methods.patches import densify
from psg_fx.planner.methods.pixels import PixelGram

B, FOLDS, CHANNELS = 2, 2, 4

FORMS = {
    "1d": Patches((3,), (1,), (1,), (1,), 2, (5,), (5,)),
    "2d": Patches((2, 3), (1, 1), (0, 2), (2, 1), 1, (5, 4), (3, 6)),
    "2d-stride": Patches((3, 2), (2, 3), (1, 0), (1, 1), 4, (5, 5), (3, 2)),
    "3d": Patches((2, 1, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 2, (3, 2, 3), (2, 4, 3)),
}


def planes(form: Patches, count: int = B) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, FOLDS, CHANNELS, *form.space, dtype=torch.float64, generator=generator)


def operand(x: torch.Tensor, form: Patches, axes: str) -> tuple[Arg, dict[str, int]]:
    return Arg(tuple(axes), form, x.dtype), dict(zip(axes, densify(x, form).shape, strict=True))


def pair(x: torch.Tensor, y: torch.Tensor, forms: tuple[Patches, Patches], axes: tuple[str, str], out: str) -> Pair:
    (a, sizes_a), (b, sizes_b) = (operand(z, f, names) for z, f, names in zip((x, y), forms, axes, strict=True))
    return Pair(a, b, tuple(out), sizes_a | sizes_b)


@pytest.mark.parametrize("form", [FORMS[name] for name in ("1d", "2d", "3d")], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize(("second", "out"), [("bsgi", "bgts"), ("bsgi", "bts"), ("asgi", "gbtas"), ("asgi", "btas")])
def test_pixel_gram(form: Patches, second: str, out: str) -> None:
    """Of two tensors with paddings of their own; samples shared or not, groups kept or summed."""
    wide = tuple(n + 1 for n in form.padding)
    reach = zip(form.space, wide, form.kernel, form.dilation, form.stride, strict=True)
    outs = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, k, d, s in reach)
    other = replace(form, padding=wide, out_space=outs)
    x, y = planes(form), planes(form, B if second[0] == "b" else 3)
    p = pair(x, y, (form, other), ("btgi", second), out)
    assert PixelGram().applies(p)
    got = PixelGram().emit(p, x, y)
    want = torch.einsum(f"btgi,{second}->{''.join(PixelGram().out(p))}", densify(x, form), densify(y, other))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("out", ["bgtsi", "gts", "bgs", "bg"])
def test_pixel_gram_keeps_positions_and_samples_and_sums_offsets(out: str) -> None:
    x = planes(FORMS["2d"])
    assert not PixelGram().applies(pair(x, x, (FORMS["2d"],) * 2, ("btgi", "bsgi"), out))


def test_pixel_gram_needs_stride_one_and_one_kernel() -> None:
    strided = FORMS["2d-stride"]
    assert not PixelGram().applies(pair(*[planes(strided)] * 2, (strided, strided), ("btgi", "bsgi"), "bgts"))
    one, two = FORMS["2d"], replace(FORMS["2d"], kernel=(3, 2), dilation=(1, 1), out_space=(3, 7))
    x = planes(one)
    assert PixelGram().applies(pair(x, x, (one, one), ("btgi", "bsgi"), "bgts"))
    assert not PixelGram().applies(pair(x, x, (one, two), ("btgi", "bsgi"), "bgts"))


def test_pixel_gram_of_half_precision_is_summed_in_float32() -> None:
    form = Patches((3, 3), (1, 1), (1, 1), (1, 1), 1, (4, 4), (4, 4))
    x = torch.full((1, 1, 512, 4, 4), 0.3).bfloat16()
    p = pair(x, x, (form, form), ("btgi", "bsgi"), "bgts")
    got = PixelGram().emit(p, x, x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.max(), 9 * 512 * x[0, 0, 0, 0, 0].float() ** 2)


ONE = Patches((2, 3), (2, 3), (0, 1), (2, 1), 2, (4, 3), (1, 1))
"""A single position of each plane, at strides that nobody takes."""


@pytest.mark.parametrize("form", [replace(FORMS["2d"], groups=2), ONE], ids=["stride-1", "one-position"])
def test_every_way_to_a_gradient(form: Patches) -> None:
    """At stride 1 or of one position three methods give it, beside the product with the patches built."""
    x = planes(form)
    a, sizes = operand(x, form, "btgi")
    grad = torch.randn(B, 2, 3, sizes["t"], dtype=torch.float64)
    p = Pair(a, Arg(tuple("bgot"), Dense(), x.dtype), tuple("bgoi"), sizes | {"o": 3})
    want = torch.einsum("btgi,bgot->bgoi", densify(x, form), grad)
    found = {m.name: m.emit(p, x, grad) for m in METHODS if m.applies(p)}
    assert set(found) == {"grouped-conv", "shifted", "windows"}
    for got in found.values():
        torch.testing.assert_close(got, want)
    strided = replace(FORMS["2d"], groups=2, stride=(1, 2))
    assert {m.name for m in METHODS if m.applies(replace(p, a=replace(a, form=strided)))} == {"grouped-conv", "shifted"}


@pytest.mark.parametrize(("stride", "padding", "dense"), [(1, 0, True), (2, 0, True), (1, 1, False)])
def test_a_kernel_of_one_pixel_needs_no_patches(stride: int, padding: int, dense: bool) -> None:
    model = nn.Conv2d(2, 3, 1, stride=stride, padding=padding)
    step = psg_fx.transform(model, lambda y: y.square().sum(), backend="eager")
    step(torch.randn(3, 2, 5, 5))
    (weight, _bias) = GRADIENTS.of(step.graphs["merged"]).values()
    forms = [leaf.form for term in weight.terms for leaf in term.network.leaves]
    assert all(isinstance(form, Dense) for form in forms) is dense


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled() -> None:
    """A norm by pixels, a depthwise gradient and a strided pixel-wise one, in one compiled step."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 6, 1, stride=2), nn.Conv2d(6, 8, 3))
    x = torch.randn(5, 4, 9, 9)
    step = psg_fx.transform(model, lambda y: F.softplus(y).sum(), quantities=[psg_fx.Norms(), psg_fx.Grads()])
    step(x)
    report = step.validate(x)
    assert report.ok, str(report)
