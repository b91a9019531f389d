"""Alike products side by side, for a device that launches each: fewer products, the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum, Grads, Norms, Quantity, zoo
from psg_fx.planner import rates
from psg_fx.planner.cost import SIDE_BY_SIDE
from support import oracle
from support.selection import one_in

aten = torch.ops.aten
BOUND = 0.1
WIDTH = 128
"""Channels with which a product of patches is what a plan takes."""


@pytest.fixture
def for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are planned and lowered for a CUDA device, on which a convolution takes longer than a product of
    patches, however small.
    """
    slow = dict.fromkeys(("convolution", "grouped_conv_output", "grouped_conv_small_output"), 1e-3)
    table = replace(rates.H100, extra={**rates.H100.extra, **slow})
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: table)


def stage(layers: int = 3) -> nn.Module:
    """Convolutions of equal shapes, few positions and many channels."""
    first = [nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), nn.Tanh()]
    alike = [m for _ in range(layers) for m in (nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Tanh())]
    torch.manual_seed(0)
    return nn.Sequential(*first, *alike, nn.Flatten(), nn.Linear(WIDTH * 16, 5))


def batch_of(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 3, 8, 8, dtype=dtype), torch.randint(5, (count,))


def parts(step: psg_fx.PerSampleModule) -> int:
    """Values that are parts of what was computed side by side."""
    nodes = step.graphs["tidied"].graph.nodes
    return sum(n.target is aten.select.int and n.args[0].target is aten.reshape.default for n in nodes)


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(
    ("quantity", "dynamic"), one_in(3, [(q, d) for q in (ClippedSum(BOUND), Grads(), Norms()) for d in (True, False)])
)
def test_against_the_loop_in_float64(quantity: Quantity, dynamic: bool) -> None:
    model = stage().double()
    step = psg_fx.transform(model, F.cross_entropy, quantities=quantity, backend="eager", dynamic=dynamic)
    for count in (5, 3, 1):
        x, y = batch_of(count, torch.float64)
        out, (_, grads) = step(x, y), oracle.loop_grads(model, F.cross_entropy, x, y)
        if isinstance(quantity, Grads):
            assert oracle.worst_error(out.grads, grads) < 1e-12
            continue
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-12
        if isinstance(quantity, ClippedSum):
            assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, BOUND)) < 1e-12
    assert parts(step) >= 3


@pytest.mark.usefixtures("for_cuda")
def test_as_many_products_for_more_layers() -> None:
    counts = []
    for layers in (2, 4):
        step = psg_fx.transform(stage(layers), F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
        step(*batch_of(5))
        nodes = step.graphs["tidied"].graph.nodes
        counts.append(sum(n.target in (aten.bmm.default, aten.mm.default) for n in nodes))
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("for_cuda")
def test_kernels_of_psg_fx() -> None:
    """Tiles of alike layers are those of one product, and their sums are read at once."""
    on = {"psg_fx.fused_kernels": True}
    model = stage()
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager", options=on)
    x, y = batch_of(6)
    report = step.validate(x, y)
    assert report.ok, report


@pytest.mark.usefixtures("for_cuda")
def test_linear_layers_stay() -> None:
    """Nothing is written for their products but the products."""
    ex = zoo.example("gpt", batch=3, layers=2, width=8, heads=2, tokens=6, vocabulary=20)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=Norms(), backend="eager")
    step(ex.inputs, ex.targets)
    assert parts(step) == 0


def test_what_takes_longer_side_by_side_stays_apart(for_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes several operands asks of each element which it is of."""
    table = rates.device("cuda")
    slow = replace(table, extra={**table.extra, SIDE_BY_SIDE: 1e-9})
    for found, joined in ((table, True), (slow, False)):
        monkeypatch.setattr(rates, "device", lambda kind, replayed=False, found=found: found)
        step = psg_fx.transform(stage(), F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
        step(*batch_of(5))
        assert (parts(step) > 0) == joined


def test_a_cpu_has_its_products_one_by_one() -> None:
    step = psg_fx.transform(stage(), F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    step(*batch_of(5))
    assert parts(step) == 0


@pytest.mark.usefixtures("for_cuda")
def test_under_a_budget_layers_stay_one_after_the_other() -> None:
    step = psg_fx.transform(
        stage(), F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager", memory_budget=2**40
    )
    step(*batch_of(5))
    assert parts(step) == 0
