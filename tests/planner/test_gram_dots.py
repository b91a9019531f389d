"""Inner products of Gram matrices that are never in memory: the op, when plans have it, and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Norms, Quantity
from psg_fx.ops.products import gram_products
from psg_fx.passes import widen
from psg_fx.planner import rates
from psg_fx.torch_private import native
from psg_fx.torch_private.fakes import symbolic_inputs
from support import oracle

SHAPES = [(3, 70, 50, 90), (1, 1, 1, 1), (2, 130, 33, 20), (2, 64, 64, 1), (2, 200, 3, 5)]
"""Samples, positions, and the elements of each row."""


def drawn(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    n, t, i, o = shape
    torch.manual_seed(0)
    return torch.randn(n, t, i).to(dtype), torch.randn(n, o, t).to(dtype).mT


@pytest.mark.parametrize("dtype", [*gram_products.DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, y = drawn(shape, dtype)
    want = (x.double() @ x.double().mT) * (y.double() @ y.double().mT)
    dots, diagonals = gram_products.gram_dots(x, y), gram_products.gram_diagonals(x, y)
    assert dots.dtype is diagonals.dtype is torch.float32
    assert oracle.relative_error(dots, want.sum((1, 2))) < 1e-5
    assert oracle.relative_error(diagonals, want.diagonal(0, 1, 2).sqrt().sum(1)) < 1e-5


EPSILON = torch.finfo(torch.float32).eps
LEAST = 8 * EPSILON
"""What a clipped sum takes no squared norm for smaller than, in units of S² (docs/design/rounding.md)."""


def repeated(positions: int, width: int, cancelling: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Equal rows of a sample, with equal gradients or such that nearly cancel; the squared norm, and S."""
    torch.manual_seed(0)
    n = 4
    x = torch.randn(n, 1, width).expand(n, positions, width).contiguous()
    some = torch.arange(positions)[None, :, None] < torch.tensor([1, 9, positions // 2, positions - 1])[:, None, None]
    scale = 1 + torch.rand(n, 1, 1)
    count = some.sum(1, keepdim=True)
    other = -scale * count / (positions - count) * 1.001 if cancelling else scale
    y = (torch.where(some, scale, other) * torch.randn(n, 1, width)).contiguous()
    squares = torch.einsum("nti,nto->nio", x.double(), y.double()).square().sum((1, 2))
    return x, y, squares, (x.double().norm(dim=2) * y.double().norm(dim=2)).sum(1)


@pytest.mark.parametrize("cancelling", [False, True])
@pytest.mark.parametrize("positions", [64, 1024])
def test_rows_that_repeat_round_no_more(positions: int, cancelling: bool) -> None:
    """All of their entries round the same way."""
    x, y, squares, scale = repeated(positions, 512, cancelling)
    error = (gram_products.gram_dots(x, y).double() - squares).abs() / scale.square()
    assert error.max() < LEAST / 2


@pytest.mark.inductor
@pytest.mark.parametrize("fused", [False, True])
def test_the_bound_of_a_sample_whose_rows_repeat_holds(fused: bool) -> None:
    x, y, squares, scale = repeated(128, 2048, cancelling=True)
    model, bound = nn.Linear(2048, 2048, bias=False), 1e-3
    step = psg_fx.transform(
        model, lambda out, y: (out * y).sum(), quantities=ClippedSum(bound),
        options={"psg_fx.fused_kernels": fused},
    )  # fmt: skip
    out = step(x, y)
    assert "(ȳ·ȳ)" in step.explain()
    error = (out.norms.double().square() - squares).abs() / scale.square()
    assert error.max() < LEAST / 2
    assert (out.clip_factors.double() * squares.sqrt()).max() < bound * 2**0.5


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    native.begin("gram_dots")
    native.finish()


def test_it_is_compiled_here() -> None:
    library = native.library("gram_dots")
    assert library is not None
    assert library.gram_dots


def test_without_a_compiler_it_is_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = drawn(SHAPES[0], torch.float32)
    want = gram_products.gram_dots(x, y), gram_products.gram_diagonals(x, y)
    monkeypatch.setattr(gram_products, "library", lambda name: None)
    for got, other in zip((gram_products.gram_dots(x, y), gram_products.gram_diagonals(x, y)), want, strict=True):
        assert oracle.relative_error(got, other) < 1e-5


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_no_number_stays_in_its_sample(value: float) -> None:
    x, y = drawn(SHAPES[0], torch.float32)
    want = gram_products.gram_dots(x, y)
    x[1, 5, 7] = value
    found = gram_products.gram_dots(x, y)
    assert found.isfinite().tolist() == [True, False, True]
    assert torch.equal(found[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_lie_anywhere(shape: tuple[int, int, int, int]) -> None:
    """Steps before samples, in wider rows, and columns as rows."""
    x, y = drawn(shape, torch.float32)
    want = gram_products.gram_dots(x, y)
    steps_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    wider = F.pad(y, (3, 2))[..., 3:-2]
    assert torch.equal(gram_products.gram_dots(steps_first, wider), want)
    assert torch.equal(gram_products.gram_dots(x.mT.contiguous().mT, y), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_op_as_a_fake(dtype: torch.dtype) -> None:
    """One trace for every number of samples."""
    x, y = drawn(SHAPES[0], dtype)
    a, b = symbolic_inputs([x, y], [0, 0])
    with a.fake_mode:  # type: ignore[attr-defined]
        found = gram_products.gram_dots(a, b)
    assert isinstance(found.shape[0], torch.SymInt)
    assert found.dtype is torch.float32


@pytest.fixture
def fused_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are planned by a table of their own, in which products cost nothing and memory much."""
    table = replace(
        rates.CPU, name="cuda", launch=0.0, bandwidth=1e6, flops={**rates.CPU.flops, ("bmm", torch.bfloat16): 1e20}
    )
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: table)
    monkeypatch.setattr(widen, "_INTO", {})  # a CPU has no products of bfloat16 into float32


class Model(nn.Module):
    """Two layers on positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 70), nn.Linear(70, 40)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(x)))).mean(1)


def ops(step: psg_fx.PerSampleModule) -> list[str]:
    return [str(node.target) for node in step.graphs["tidied"].graph.nodes if "gram_dots" in str(node.target)]


@pytest.mark.usefixtures("fused_pays")
@pytest.mark.parametrize("quantity", [Norms(), Norms(per="parameter"), ClippedSum(0.5)], ids=str)
def test_a_step_with_it_agrees_with_one_without(quantity: Quantity) -> None:
    """Both read the same values in bfloat16 and form Gram matrices in float32: of 16 positions, less than gradients."""
    torch.manual_seed(0)
    model, x, y = Model().bfloat16(), torch.randn(5, 16, 40, dtype=torch.bfloat16), torch.randint(40, (5,))
    found = []
    for on in (True, False):
        step = psg_fx.transform(
            model, F.cross_entropy, quantities=quantity, backend="eager", options={"psg_fx.fused_kernels": on}
        )
        out = step(x, y)
        norms = out.norms
        found.append(torch.stack(list(norms.values())) if isinstance(norms, dict) else norms)
        assert bool(ops(step)) is on
    assert oracle.relative_error(found[0], found[1]) < 1e-5


@pytest.mark.usefixtures("fused_pays")
def test_not_in_float32() -> None:
    """There `bmm` is faster."""
    torch.manual_seed(0)
    step = psg_fx.transform(
        Model(), F.cross_entropy, quantities=Norms(), backend="eager", options={"psg_fx.fused_kernels": True}
    )
    step(torch.randn(5, 20, 40), torch.randint(40, (5,)))
    assert not ops(step)


@pytest.fixture
def memory_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are written cost more than any product."""
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: replace(rates.CPU, bandwidth=1e6))


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.usefixtures("memory_is_dear")
def test_a_compiled_step_on_a_cpu() -> None:
    """For any number of samples, but for a graph of one."""
    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(6, 20, 40), torch.randint(40, (6,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.5), backend="inductor", dynamic=True)
    for size in (6, 3, 1):
        out, (_, grads) = step(x[:size], y[:size]), oracle.loop_grads(model, F.cross_entropy, x[:size], y[:size])
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-5
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.5)) < 1e-5
    assert len(ops(step)) == 2


@pytest.mark.usefixtures("memory_is_dear")
@pytest.mark.parametrize(("backend", "told"), [("eager", None), ("inductor", {"psg_fx.fused_kernels": False})])
def test_where_there_is_none(backend: str, told: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not without a compiler, and not if they are turned off."""
    torch.manual_seed(0)
    monkeypatch.setattr("psg_fx.step.module.compile_graph", lambda gm, *others: gm)
    step = psg_fx.transform(Model(), F.cross_entropy, quantities=Norms(), backend=backend, options=told)
    step(torch.randn(5, 20, 40), torch.randint(40, (5,)))
    assert not ops(step)
