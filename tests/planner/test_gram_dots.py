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
from psg_fx.ops import gram_products
from psg_fx.passes import widen
from psg_fx.planner import rates
from psg_fx.torch_private.fakes import symbolic_inputs
from support import oracle

SHAPES = [(3, 70, 50, 90), (1, 1, 1, 1), (2, 130, 33, 20), (2, 64, 64, 1), (2, 200, 3, 5)]
"""Samples, positions, and the elements of each row."""


def drawn(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    n, t, i, o = shape
    torch.manual_seed(0)
    return torch.randn(n, t, i).to(dtype), torch.randn(n, o, t).to(dtype).mT


@pytest.mark.parametrize("dtype", gram_products.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op_by_torch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, y = drawn(shape, dtype)
    want = (x.double() @ x.double().mT) * (y.double() @ y.double().mT)
    dots, diagonals = gram_products.gram_dots(x, y), gram_products.gram_diagonals(x, y)
    assert dots.dtype is diagonals.dtype is torch.float32
    assert oracle.relative_error(dots, want.sum((1, 2))) < 1e-5
    assert oracle.relative_error(diagonals, want.diagonal(0, 1, 2).sqrt().sum(1)) < 1e-5


def test_the_op_as_a_fake() -> None:
    """One trace for every number of samples."""
    x, y = drawn(SHAPES[0], torch.bfloat16)
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
    """Both read the same values in bfloat16 and form Gram matrices in float32: of 20 positions, less than gradients."""
    torch.manual_seed(0)
    model, x, y = Model().bfloat16(), torch.randn(5, 20, 40, dtype=torch.bfloat16), torch.randint(40, (5,))
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
