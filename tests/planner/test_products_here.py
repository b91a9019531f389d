"""Products of samples in C++ with the sums of their squares: the ops, when plans have them, and their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads, Norms
from psg_fx.ops.products import products_here
from psg_fx.planner import rates
from psg_fx.planner.methods import fused
from psg_fx.torch_private import native
from psg_fx.torch_private.fakes import symbolic_inputs
from support import oracle
from support.selection import one_in

SHAPES = [
    (3, 70, 50, 90),
    (1, 1, 1, 1),
    (2, 13, 3, 20),
    (2, 6, 4, 1),
    (5, 3, 200, 30),
    (4, 20, 130, 64),
    (2, 5, 256, 2112),
]
"""Samples, places that are summed, rows and columns; the last product is written past the caches."""


def drawn(shape: tuple[int, int, int, int], turned: int = 0) -> tuple[Tensor, Tensor]:
    """turned: whether each operand lies the other way round, bit by bit."""
    n, t, i, o = shape
    torch.manual_seed(0)
    x, y = torch.randn(n, t, i), torch.randn(n, t, o)
    return (x.mT.contiguous().mT if turned & 1 else x), (y.mT.contiguous().mT if turned & 2 else y)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    native.begin(products_here.LIBRARY)
    native.finish()


def test_many_places_round_no_more_than_the_blas() -> None:
    """A long sum is a sum of sums."""
    torch.manual_seed(0)
    x, y = torch.rand(1, 100_000, 8), torch.rand(1, 100_000, 32)
    want = x.double().mT @ y.double()
    assert oracle.relative_error(products_here.products(x, y)[0], want) < 2e-6


@pytest.mark.parametrize("turned", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ops(shape: tuple[int, int, int, int], turned: int) -> None:
    x, y = drawn(shape, turned)
    want = x.double().mT @ y.double()
    product, squares = products_here.products(x, y)
    assert oracle.relative_error(product, want) < 1e-6
    assert oracle.relative_error(squares, want.square().sum((1, 2))) < 1e-6
    assert torch.equal(products_here.squares(x, y), squares)


def test_they_are_compiled_here() -> None:
    library = native.library(products_here.LIBRARY)
    assert library is not None
    assert library.products


def test_without_a_compiler_they_are_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = drawn(SHAPES[0])
    want = *products_here.products(x, y), products_here.squares(x, y)
    monkeypatch.setattr(products_here, "library", lambda name: None)
    for got, other in zip((*products_here.products(x, y), products_here.squares(x, y)), want, strict=True):
        assert oracle.relative_error(got, other) < 1e-6


@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6)], ids=str)
def test_nothing_to_sum(shape: tuple[int, int, int, int]) -> None:
    product, squares = products_here.products(*drawn(shape))
    assert product.shape == (shape[0], *shape[2:])
    assert not product.any()
    assert squares.tolist() == [0.0] * shape[0]


def test_numbers_do_not_depend_on_threads() -> None:
    x, y = drawn((3, 20, 300, 40))
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(products_here.products(x, y))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(p, found[0][0]) and torch.equal(s, found[0][1]) for p, s in found)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_no_number_stays_in_its_sample(value: float) -> None:
    x, y = drawn(SHAPES[0])
    want, squares = products_here.products(x, y)
    x[1, 5, 7] = value
    product, found = products_here.products(x, y)
    assert found.isfinite().tolist() == [True, False, True]
    assert torch.equal(product[[0, 2]], want[[0, 2]])
    assert torch.equal(found[[0, 2]], squares[[0, 2]])
    assert product[1].isfinite().all(1).logical_not().nonzero().tolist() == [[7]]


def test_the_ops_as_fakes() -> None:
    """One trace for every number of samples."""
    a, b = symbolic_inputs(list(drawn(SHAPES[0])), [0, 0])
    with a.fake_mode:  # type: ignore[attr-defined]
        product, squares = products_here.products(a, b)
    assert isinstance(product.shape[0], torch.SymInt)
    assert product.shape[1:] == (50, 90)
    assert squares.shape == product.shape[:1]


class Model(nn.Module):
    """More positions than features, so that products take less than Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 128), nn.Linear(128, 96)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(x)))).mean(1)


def ops(step: psg_fx.PerSampleModule) -> list[str]:
    targets = [str(node.target) for node in step.graphs["tidied"].graph.nodes]
    return [target for target in targets if "products_here" in target or "squares_here" in target]


QUANTITIES = {
    "norms": (Norms(), "psg_fx.squares_here.default"), "clipped": (ClippedSum(0.5), "psg_fx.products_here.default"),
    "gradients": (Grads(), "psg_fx.products_here.default"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", one_in(2, QUANTITIES))
def test_a_compiled_step(name: str) -> None:
    """For any number of samples, but for a graph of one."""
    quantity, op = QUANTITIES[name]
    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(6, 300, 96), torch.randint(96, (6,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=quantity, backend="inductor", dynamic=True)
    for size in (6, 3, 1):
        out, (_, grads) = step(x[:size], y[:size]), oracle.loop_grads(model, F.cross_entropy, x[:size], y[:size])
        if name == "gradients":
            assert oracle.worst_error(out.grads, grads) < 1e-5
            continue
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-5
        if name == "clipped":
            assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.5)) < 1e-5
    assert ops(step) == [op] * 2


class OnePosition(nn.Module):
    """A convolution of one position and a linear layer: outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(5, 72, 3), nn.Linear(72, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.conv(x).flatten(1).tanh())
        return found


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("quantity", one_in(2, [ClippedSum(0.5), Grads()]))
def test_outer_products_that_no_cache_holds(quantity: psg_fx.Quantity, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written past the caches; those that a cache holds are left to the loops that read them."""
    torch.manual_seed(0)
    model, x, y = OnePosition(), torch.randn(6, 5, 3, 3), torch.randint(64, (6,))

    def step() -> psg_fx.PerSampleModule:
        return psg_fx.transform(model, F.cross_entropy, quantities=quantity, backend="inductor", dynamic=True)

    small = step()
    small(x, y)
    assert not ops(small)
    monkeypatch.setattr(fused, "BEYOND_CACHES", 0)
    fetched = {**rates.CPU.extra, "fetched": 1e3}  # who writes through the caches is slower, however little it is
    slow = replace(rates.CPU, extra=fetched, kept=0.0)
    monkeypatch.setattr("psg_fx.planner.rates.CPU", slow)
    monkeypatch.setattr("psg_fx.planner.cost.BEYOND_CACHES", 0)
    large = step()
    for size in (6, 3, 1):
        out, (_, grads) = large(x[:size], y[:size]), oracle.loop_grads(model, F.cross_entropy, x[:size], y[:size])
        if isinstance(quantity, Grads):
            assert oracle.worst_error(out.grads, grads) < 1e-5
        else:
            assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.5)) < 1e-5
    assert ops(large) == ["psg_fx.products_here.default"] * 2


@pytest.mark.parametrize(("backend", "told"), [("eager", None), ("inductor", {"psg_fx.fused_kernels": False})])
def test_where_there_are_none(backend: str, told: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not without a compiler, and not if they are turned off."""
    monkeypatch.setattr("psg_fx.step.module.compile_graph", lambda gm, *others: gm)
    step = psg_fx.transform(Model(), F.cross_entropy, quantities=Norms(), backend=backend, options=told)
    step(torch.randn(5, 300, 96), torch.randint(96, (5,)))
    assert not ops(step)


@pytest.mark.inductor
def test_outputs_that_are_used_again() -> None:
    """A product of 2 MiB lies in the block of the last call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    x, y = torch.randn(8, 256, 256), torch.randn(8, 256, 256)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target, reduction="none").mean((1, 2)).mean()

    step = psg_fx.transform(model, loss, quantities=Grads(), backend="inductor", reuse_outputs=True)
    out = step(x, y)
    place, first = out.grads["0.weight"].data_ptr(), out.grads["0.weight"].clone()
    again = step(x, y, out=out)
    assert ops(step)
    assert again.grads["0.weight"].data_ptr() == place
    assert torch.equal(again.grads["0.weight"], first)
