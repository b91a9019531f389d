"""The kernels of psg_fx on a CUDA device: alone, and in steps that are planned as if products cost nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import psg_fx
from psg_fx import ClippedSum, Grads, Norms, Quantity, zoo
from psg_fx.ops.products import gram_products, patch_products, tile_products
from psg_fx.ops.products.window import Window
from psg_fx.planner import rates
from support import oracle
from support.device import CUDA

pytestmark = [*CUDA, pytest.mark.usefixtures("fresh_compiler", "full_precision")]

SHAPES = [(3, 70, 50, 90), (1, 1, 1, 1), (2, 130, 33, 200), (4, 256, 512, 384), (70000, 3, 2, 5)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", tile_products.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone(shape: tuple[int, int, int, int], dtype: torch.dtype, compiled: bool) -> None:
    n, i, t, o = shape
    torch.manual_seed(0)
    a, b = torch.randn(n, t, i, device="cuda").to(dtype).mT, torch.randn(n, t, o, device="cuda").to(dtype)
    run = torch.compile(tile_products.tile_product) if compiled else tile_products.tile_product
    product, squares = run(a, b)
    want = torch.bmm(a.double(), b.double())
    assert oracle.relative_error(squares.sum(1), product.double().square().sum((1, 2))) < 1e-5
    assert oracle.relative_error(product, want) < 16 * torch.finfo(dtype).eps
    assert oracle.relative_error(tile_products.tile_squares(a, b).sum(1), want.square().sum((1, 2))) < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kept_in_bfloat16(shape: tuple[int, int, int, int]) -> None:
    n, i, t, o = shape
    torch.manual_seed(0)
    a, b = torch.randn(n, i, t, device="cuda"), torch.randn(n, t, o, device="cuda")
    product, squares = tile_products.tile_product(a, b, torch.bfloat16)
    assert product.dtype is torch.bfloat16
    assert oracle.relative_error(product, a.double() @ b.double()) < 2**-8
    assert oracle.relative_error(squares.sum(1), product.double().square().sum((1, 2))) < 1e-5


WINDOWS = {
    "plain": ((3, 6, 19, 18), 70, Window(1, [3, 3], [1, 1], [0, 0], [1, 1])),
    "padded, in steps": ((2, 4, 9, 9), 5, Window(1, [3, 2], [2, 1], [1, 1], [1, 1])),
    "groups, with holes": ((3, 6, 11, 7), 3, Window(3, [2, 3], [1, 2], [0, 2], [2, 1])),
    "large": ((8, 64, 16, 16), 128, Window(1, [3, 3], [1, 1], [1, 1], [1, 1])),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", tile_products.DTYPES, ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_patches_alone(name: str, dtype: torch.dtype, channels_last: bool, compiled: bool) -> None:
    (n, *sizes), outputs, window = WINDOWS[name]
    torch.manual_seed(0)
    x, places = torch.randn(n, *sizes, device="cuda").to(dtype), math.prod(window.out_space(sizes[1:]))
    y = torch.randn(n * window.groups, outputs, places, device="cuda").to(dtype)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    run = torch.compile(patch_products.patch_product) if compiled else patch_products.patch_product
    product, squares = run(y, x, window)
    want = torch.bmm(y.double(), window.patches(x.double()))
    assert oracle.relative_error(product, want) < 16 * torch.finfo(dtype).eps
    assert oracle.relative_error(squares.sum(1), product.double().square().sum((1, 2))) < 1e-5
    assert oracle.relative_error(patch_products.patch_squares(y, x, window).sum(1), want.square().sum((1, 2))) < 1e-5


GRAMS = [(3, 70, 50, 90), (1, 1, 1, 1), (2, 197, 768, 40), (4, 512, 64, 384), (70000, 3, 2, 5)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", gram_products.DTYPES, ids=str)
@pytest.mark.parametrize("shape", GRAMS, ids=str)
def test_gram_dots_alone(shape: tuple[int, int, int, int], dtype: torch.dtype, compiled: bool) -> None:
    n, t, i, o = shape
    torch.manual_seed(0)
    x, y = torch.randn(n, t, i, device="cuda").to(dtype), torch.randn(n, o, t, device="cuda").to(dtype).mT
    functions = gram_products.gram_dots, gram_products.gram_diagonals
    dots, diagonals = (torch.compile(f)(x, y) if compiled else f(x, y) for f in functions)
    want = (x.double() @ x.double().mT) * (y.double() @ y.double().mT)
    assert oracle.relative_error(dots, want.sum((1, 2))) < 2e-5
    assert oracle.relative_error(diagonals, want.diagonal(0, 1, 2).sqrt().sum(1)) < 2e-5


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("quantity", [Norms(), ClippedSum(0.1)], ids=str)
def test_gram_dots_in_a_step(quantity: Quantity, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, against the same step without them."""
    free = replace(rates.H100, launch=0.0, bandwidth=1e9)
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: free)
    ex = zoo.example("gpt", 3, "cuda", layers=1, width=64, heads=2, tokens=20)
    found = []
    for on in (True, False):
        step = psg_fx.transform(
            ex.model, ex.loss_fn, quantities=quantity, mode=mode, options={"psg_fx.fused_kernels": on}
        )
        with torch.autocast("cuda", torch.bfloat16):
            found.append([step(ex.inputs, ex.targets).norms for _ in range(4)][-1])
        nodes = step.graphs["tidied"].graph.nodes
        assert any("gram_dots" in str(node.target) for node in nodes) is on
    assert oracle.relative_error(*found) < 1e-2


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("quantity", [Norms(), ClippedSum(0.1), [Grads(), Norms()]], ids=str)
@pytest.mark.parametrize("name", ["gpt", "simplecnn"])
def test_in_a_step(
    name: str, quantity: Quantity | list[Quantity], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = replace(rates.H100, launch=0.0, flops={**rates.H100.flops, ("bmm", torch.float32): 1e20})
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: free)
    sizes = {"image": 12, "width": 4, "hidden": 8} if name == "simplecnn" else {"layers": 1, "width": 32, "heads": 2}
    ex = zoo.example(name, 3, "cuda", **sizes)
    on = {"psg_fx.fused_kernels": True}
    step = psg_fx.transform(
        ex.model, ex.loss_fn, quantities=quantity, batch_dim=ex.batch_dim, backend=backend, options=on
    )
    out = step(ex.inputs, ex.targets)
    nodes = step.graphs["tidied"].graph.nodes
    assert any(str(node.target).startswith(("psg_fx.tile", "psg_fx.patch")) for node in nodes)
    grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets, batch_dim=ex.batch_dim)[1]
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < 5e-5
    if isinstance(quantity, ClippedSum):
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 5e-5
