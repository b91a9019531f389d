"""Products whose squared norm is taken tile by tile: when plans have them, and their numbers through a whole step."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_weight

import psg_fx
from psg_fx import ClippedSum, Grads, MeanGrad, Norms, Quantity, SecondMoment, WeightedSum
from psg_fx.ops.products import patch_products, tile_products
from psg_fx.ops.products.window import Window
from psg_fx.planner import rates
from psg_fx.planner.cost import Fused
from psg_fx.planner.methods import FUSED
from psg_fx.torch_private.fakes import symbolic_inputs
from support import oracle
from support.selection import one_in

ON = {"psg_fx.fused_kernels": True}


@pytest.fixture
def fused_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are planned for a CUDA device whose matrix products cost nothing but what they move."""
    table = replace(rates.H100, launch=0.0, flops={**rates.H100.flops, ("bmm", torch.float32): 1e20})
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: table)


class Model(nn.Module):
    """Positions, convolutions with groups, steps and holes, a weight that is used twice, a loss of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 4, (3, 2), padding=(1, 0), stride=(1, 3), dilation=(1, 2))
        self.conv = nn.Conv1d(4, 6, 3, groups=2, padding=1)
        self.up = nn.Linear(6, 70)
        self.down = nn.Linear(70, 6)
        self.twice = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.image(x[:, None])
        h = self.conv(x + image.mean((2, 3))[..., None]).mT
        h = h + self.down(torch.tanh(self.up(h)))
        return self.twice(torch.tanh(self.twice(h))).mean(1)


def tile_ops(step: psg_fx.PerSampleModule) -> list[str]:
    """The ops of psg_fx in the graph that is compiled."""
    names = [str(node.target) for node in step.graphs["tidied"].graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith(("psg_fx.tile", "psg_fx.patch"))]


def problem(batch: int = 5) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(batch, 4, 130), torch.randint(6, (batch,))


QUANTITIES: dict[str, list[Quantity]] = {
    "norms": [Norms()],
    "by parameter": [Norms(per="parameter")],
    "clipped sum": [ClippedSum(0.5)],
    "with gradients": [Grads(), Norms(), ClippedSum(0.5)],
    "with other sums": [Norms(), ClippedSum(0.5), WeightedSum(), MeanGrad()],
    "with squares": [ClippedSum(0.5), SecondMoment()],
}


@pytest.mark.usefixtures("fused_pays")
@pytest.mark.parametrize(("batch", "asked"), one_in(2, [(batch, asked) for asked in QUANTITIES for batch in (5, 1)]))
def test_a_step_with_them_is_right(asked: str, batch: int) -> None:
    model, x, y = problem(batch)
    step = psg_fx.transform(model, F.cross_entropy, quantities=QUANTITIES[asked], backend="eager", options=ON)
    directions = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    given = {"weights": torch.rand(batch), "directions": directions}
    read = {name for quantity in QUANTITIES[asked] for name in quantity.reads}
    given = {name: value for name, value in given.items() if name in read}
    report = step.validate(x, y, **given)
    assert report.ok, report
    assert tile_ops(step)


@pytest.mark.usefixtures("fused_pays")
def test_what_is_read_again_is_kept() -> None:
    """A clipped sum of formed gradients reads them once: their norm comes of the product."""
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), Norms()], backend="eager", options=ON)
    step(x, y)
    assert "tile_product" in tile_ops(step)
    assert "tile_squares" not in tile_ops(step)


@pytest.mark.usefixtures("fused_pays")
def test_off_by_default() -> None:
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=Norms(), backend="eager")
    step(x, y)
    assert not tile_ops(step)


def test_never_on_a_cpu_nor_in_float64() -> None:
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=Norms(), backend="eager", options=ON)
    step(x, y)
    assert not tile_ops(step)
    assert torch.float64 not in tile_products.DTYPES


def test_explain_tells_what_they_would_gain() -> None:
    """Bfloat16 at a transformer's sizes: what is moved costs more than what is multiplied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 768), nn.Flatten(), nn.Linear(768 * 190, 2)).bfloat16()
    step = psg_fx.transform(model, F.cross_entropy, quantities=Norms(), backend="eager")
    step(torch.randn(4, 190, 768, dtype=torch.bfloat16), torch.randint(2, (4,)))
    told = step.explain(device="h100")
    assert 'options={"psg_fx.fused_kernels": True}' in told
    row = next(line for line in told.splitlines() if line.startswith("0.weight") and "tile-squares" in line)
    before, after = (float(word) for word in row.split() if word.replace(".", "").isdigit())
    assert after < before


@pytest.mark.parametrize(
    ("capability", "mode", "told", "on"),
    [
        ((9, 0), None, None, Fused.TIMED), ((9, 0), "reduce-overhead", None, Fused.TIMED),
        ((8, 0), None, None, Fused.NONE), ((8, 0), None, True, Fused.ALL),
        ((9, 0), None, False, Fused.NONE), ((9, 0), "reduce-overhead", True, Fused.ALL),
    ],
)  # fmt: skip
def test_they_are_on_where_they_were_timed(
    capability: tuple[int, int], mode: str | None, told: bool | None, on: Fused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: rates.H100)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    options = None if told is None else {"psg_fx.fused_kernels": told}
    settings = psg_fx.transform(nn.Linear(2, 2), F.cross_entropy, mode=mode, options=options).settings
    there = torch.device("cuda")
    assert settings.rates_of(there).fused is on
    assert settings.own_kernels(there) == (on is not Fused.NONE)
    assert settings.rates_of(there).compiled == (told is not False)
    assert told or settings.rates_of(torch.device("cpu")).fused is Fused.NONE


def test_a_typing_error_is_refused() -> None:
    with pytest.raises(psg_fx.BadArgument, match=r"psg_fx\.fused"):
        psg_fx.transform(nn.Linear(2, 2), F.cross_entropy, options={"psg_fx.fused": True})


@pytest.mark.inductor
@pytest.mark.usefixtures("fused_pays", "fresh_compiler")
def test_compiled_with_other_options() -> None:
    """The option is psg_fx's own: torch.compile gets the others."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 6), torch.randn(5, 9, 6), torch.randn(5, 9, 6)
    options = ON | {"max_autotune": False}
    step = psg_fx.transform(model, F.mse_loss, quantities=Norms(), options=options, dynamic=True)
    for batch in (5, 3):
        got = step(x[:batch], y[:batch]).norms
        assert tile_ops(step)
        _, grads = oracle.loop_grads(model, F.mse_loss, x[:batch], y[:batch])
        assert oracle.relative_error(got, oracle.norms(grads)) < 1e-5


SHAPES = [(3, 70, 50, 90), (1, 1, 1, 1), (2, 130, 33, 200), (2, 64, 1, 64)]


@pytest.mark.parametrize("dtype", tile_products.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ops_by_torch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    n, i, t, o = shape
    torch.manual_seed(0)
    a, b = torch.randn(n, t, i).to(dtype).mT, torch.randn(n, t, o).to(dtype)
    want = torch.bmm(a.double(), b.double())
    product, squares = tile_products.tile_product(a, b)
    down, across = tile_products.tiles(i, o)
    assert squares.shape == (n, down * across)
    assert squares.dtype is torch.float32
    assert oracle.relative_error(squares.sum(1), product.double().square().sum((1, 2))) < 1e-5
    assert product.dtype is dtype
    assert oracle.relative_error(product, want) < 16 * torch.finfo(dtype).eps
    assert oracle.relative_error(tile_products.tile_squares(a, b).sum(1), want.square().sum((1, 2))) < 1e-5


WINDOWS = {
    "plain": ((3, 6, 9, 8), 70, Window(1, [3, 3], [1, 1], [0, 0], [1, 1])),
    "padded, in steps": ((2, 4, 9, 9), 5, Window(1, [3, 2], [2, 1], [1, 1], [1, 1])),
    "groups, with holes": ((3, 6, 11, 7), 3, Window(3, [2, 3], [1, 2], [0, 2], [2, 1])),
    "of one entry": ((1, 1, 1, 1), 1, Window(1, [1, 1], [1, 1], [0, 0], [1, 1])),
}
"""Sizes of x, channels of y in a group, and how x is read."""


@pytest.mark.parametrize("dtype", tile_products.DTYPES, ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_the_ops_of_patches_by_torch(name: str, dtype: torch.dtype) -> None:
    """Against the gradient that torch has of a convolution of a sample."""
    (n, *sizes), outputs, window = WINDOWS[name]
    torch.manual_seed(0)
    x, out = torch.randn(n, *sizes).to(dtype), window.out_space(sizes[1:])
    y = torch.randn(n, window.groups * outputs, *out).to(dtype)
    shape = (window.groups * outputs, sizes[0] // window.groups, *window.kernel)
    want = torch.stack([
        conv2d_weight(x[k : k + 1].double(), shape, y[k : k + 1].double(), *window[2:], groups=window.groups)
        for k in range(n)
    ]).view(n * window.groups, outputs, -1)  # fmt: skip
    rows = y.view(n * window.groups, outputs, -1)
    product, squares = patch_products.patch_product(rows, x, window)
    assert product.dtype is dtype
    assert oracle.relative_error(product, want) < 16 * torch.finfo(dtype).eps
    assert oracle.relative_error(squares.sum(1), product.double().square().sum((1, 2))) < 1e-5
    found = patch_products.patch_squares(rows, x, window)
    assert found.shape == squares.shape
    assert oracle.relative_error(found.sum(1), want.square().sum((1, 2))) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="its Triton does not interpret loops with this numpy")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here; `make cuda` runs the same")
def test_the_kernels_in_the_interpreter() -> None:
    """Every shape and dtype of `bench/no_device/tiles.py`, which says what each came to."""
    bench = Path(__file__).resolve().parents[2] / "bench"
    own = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(bench)}
    command = [sys.executable, str(bench / "no_device/tiles.py"), "executed"]
    done = subprocess.run(command, env=os.environ | own, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 15
    assert all(errors["error"] < 1e-5 and errors.get("product", 0.0) < 4 for errors in found.values()), found


def test_the_ops_as_fakes() -> None:
    """Shapes and dtypes for a batch size that is a symbol."""
    a, b = symbolic_inputs(
        [torch.randn(3, 70, 50, dtype=torch.bfloat16), torch.randn(3, 50, 130, dtype=torch.bfloat16)], [0, 0]
    )
    with a.fake_mode:  # type: ignore[attr-defined]
        product, squares = tile_products.tile_product(a, b)
    assert (product.shape[1:], product.dtype) == ((70, 130), torch.bfloat16)
    assert (squares.shape[1:], squares.dtype) == ((2 * 3,), torch.float32)
    assert isinstance(squares.shape[0], torch.SymInt)
    assert tile_products.tile_squares(a, b).shape == squares.shape


def test_the_ops_of_patches_as_fakes() -> None:
    window = Window(2, [3, 3], [1, 1], [1, 1], [1, 1])
    y, x = symbolic_inputs([torch.randn(3, 2 * 70, 5, 6), torch.randn(3, 8, 5, 6)], [0, 0])
    with y.fake_mode:  # type: ignore[attr-defined]
        rows = y.view(-1, 70, 30)
        product, squares = patch_products.patch_product(rows, x, window)
    assert product.shape[1:] == (70, 4 * 9)
    assert squares.shape[1:] == (2 * 1,)
    assert isinstance(squares.shape[0], torch.SymInt)
    assert patch_products.patch_squares(rows, x, window).shape == squares.shape


@pytest.mark.usefixtures("fused_pays")
def test_patches_that_cost_memory_are_not_formed() -> None:
    """A clipped sum of an image network, whose patches are nine times its images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 26 * 26, 3))
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.5), backend="eager", options=ON)
    report = step.validate(torch.randn(4, 16, 28, 28), torch.randint(3, (4,)))
    assert report.ok, report
    assert "patch_product" in tile_ops(step)


def test_methods_are_named_apart() -> None:
    assert len({method.name for method in FUSED}) == len(FUSED)
