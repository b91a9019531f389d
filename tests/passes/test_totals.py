"""Norms of the whole model and sums of small gradients, added up together: fewer nodes, the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum, Grads, MeanGrad, Norms, Quantity, WeightedSum, zoo
from psg_fx.algebra.asks import Materialized
from psg_fx.graph import facts
from psg_fx.planner import rates
from psg_fx.step import settings
from support import oracle
from support.selection import one_in, selected

aten = torch.ops.aten
BOUND = 0.1


@pytest.fixture
def for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are planned and lowered for a CUDA device."""
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: rates.H100)


class Model(nn.Module):
    """Biases, scales, a convolution, positions, a tied weight, one that is not reached, a number, two alike."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.position = nn.Parameter(torch.randn(40, 6))
        self.up = nn.Linear(6, 70)
        self.down = nn.Linear(70, 6)
        self.tied = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift, self.again = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.shift + self.again + self.norm(self.conv(x).mT) + self.position
        h = h + self.down(torch.tanh(self.up(h)))
        return self.scale * self.tied(torch.tanh(self.tied(h))).mean(1)


def problem(batch: int = 5) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(batch, 4, 40), torch.randint(6, (batch,))


ASKED: dict[str, list[Quantity]] = {
    "norms": [Norms()],
    "clipped sum": [ClippedSum(BOUND)],
    "with gradients": [Grads(), ClippedSum(BOUND)],
    "two sums": [ClippedSum(BOUND), WeightedSum(), MeanGrad()],
    "sum before norms": [WeightedSum(), Norms()],
    "some by parameter": [Norms(per="parameter"), ClippedSum(BOUND)],
    "weighted": [ClippedSum(BOUND, weighted=True), Norms(squared=True)],
}


def sums_to_samples(step: psg_fx.PerSampleModule) -> int:
    """The reductions of a value with several entries for each sample to one number."""
    nodes = [n for n in step.graphs["tidied"].graph.nodes if n.target is aten.sum.dim_IntList]
    shapes = [facts.shape(n.meta["val"]) for n in nodes]
    return sum(len(shape) == 1 and bool(shape[0].free_symbols) for shape in shapes)


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize("sizes", [(5, 1), pytest.param((1, 5), marks=pytest.mark.rest)], ids=str)
@pytest.mark.parametrize("asked", selected(ASKED, {"with gradients", "weighted", "two sums"}))
def test_the_numbers_are_the_same(asked: str, sizes: tuple[int, ...]) -> None:
    """Norms and clipped sums alone are in the other sets."""
    model, x, y = problem(max(sizes))
    step = psg_fx.transform(model, F.cross_entropy, quantities=ASKED[asked], backend="eager")
    for batch in sizes:
        given: dict[str, Any] = {}
        if any("weights" in quantity.reads for quantity in ASKED[asked]):
            given = {"weights": torch.rand(batch)}
        report = step.validate(x[:batch], y[:batch], **given)
        assert report.ok, report
        if "Grads" in repr(ASKED[asked]):
            grads = step(x[:batch], y[:batch]).grads
            assert all(g.is_contiguous() for g in grads.values())


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)], ids=str)
def test_a_parameter_without_elements(shape: tuple[int, ...]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing, self.layer = nn.Parameter(torch.zeros(shape)), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.nothing.sum()

    step = psg_fx.transform(Net(), F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    report = step.validate(torch.randn(5, 6), torch.randint(3, (5,)))
    assert report.ok, report


@pytest.mark.usefixtures("for_cuda")
def test_against_the_loop_in_float64() -> None:
    model, x, y = problem()
    model, x = model.double(), x.double()
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager", dynamic=True)
    for batch in (5, 3, 1):
        out = step(x[:batch], y[:batch])
        _, grads = oracle.loop_grads(model, F.cross_entropy, x[:batch], y[:batch])
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-12
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, BOUND)) < 1e-12


@pytest.mark.usefixtures("for_cuda")
def test_two_parameters_with_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norm by a kernel of psg_fx is one value, which counts twice."""
    monkeypatch.setattr(rates, "fused_kernels_pay", lambda device: True)
    monkeypatch.setattr(settings, "_has_triton", lambda: True)

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.one(x) + self.two(x)).mean(1)

    torch.manual_seed(0)
    model, x, y = Twins(), torch.randn(3, 200, 64), torch.randint(64, (3,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    out = step(x, y)
    assert any("tile" in str(n.target) for n in step.graphs["tidied"].graph.nodes)
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-5


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_numbers_along_a_gradient_are_no_weights_of_samples(along: str) -> None:
    numbers = torch.rand(16 if along == "rows" else 256)

    def scaled(g: torch.Tensor) -> torch.Tensor:
        return (g * (numbers[:, None] if along == "rows" else numbers)).sum(0)

    @dataclass(frozen=True)
    class Scaled(Quantity):
        field: ClassVar[str] = "scaled"

        def asks(self) -> tuple[Any, ...]:
            return (Materialized(),)

        def finish(self, r: Any, weights: Any, batch: int) -> dict[str, Any]:
            return {"scaled": scaled(r["grads"]["weight"])}

    torch.manual_seed(0)
    model, x, y = nn.Linear(256, 16), torch.randn(5, 100, 256), torch.randint(16, (5, 100))
    loss = lambda out, target: F.cross_entropy(out.mT, target)  # noqa: E731
    out = psg_fx.transform(model, loss, quantities=Scaled(), backend="eager")(x, y)
    _, grads = oracle.loop_grads(model, loss, x, y)
    assert oracle.relative_error(out.scaled, scaled(grads["weight"])) < 1e-5


@pytest.mark.usefixtures("for_cuda")
def test_one_reduction_for_all_that_is_small() -> None:
    """And one for the rows of what is large: the number does not grow with the layers."""
    counts = []
    for layers in (1, 2):
        ex = zoo.example("gpt", batch=3, layers=layers, width=8, heads=2, tokens=6, vocabulary=20)
        step = psg_fx.transform(ex.model, ex.loss_fn, quantities=ClippedSum(1.0), backend="eager")
        step(ex.inputs, ex.targets)
        counts.append(sums_to_samples(step))
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("for_cuda")
def test_norms_by_parameter_stay_apart() -> None:
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=Norms(per="parameter"), backend="eager")
    step(x, y)
    assert not [n for n in step.graphs["tidied"].graph.nodes if n.meta.get("psg_fx_pass") == "totals"]


@pytest.mark.usefixtures("for_cuda")
def test_small_sums_are_slices_of_one() -> None:
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    sums = step(x, y).clipped_sum
    at = {name: sums[name].untyped_storage().data_ptr() for name in sums}
    assert at["up.bias"] == at["down.bias"] == at["norm.weight"] != at["up.weight"]
    assert all(value.is_contiguous() for value in sums.values())
    before = sums["down.bias"].clone()
    sums["up.bias"].add_(1)
    assert torch.equal(sums["down.bias"], before)


def test_on_a_cpu_results_have_memory_of_their_own() -> None:
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    sums = step(x, y).clipped_sum
    at = [sums[name].untyped_storage().data_ptr() for name in ("up.bias", "down.bias", "norm.weight", "conv.bias")]
    assert len(set(at)) == len(at)


@pytest.mark.parametrize("groups", [None, torch.tensor([1, 0, 1, 1, 2])], ids=["samples", "groups"])
def test_on_a_cpu_sums_of_stored_gradients_are_products(groups: torch.Tensor | None) -> None:
    """Of large ones; they are those of the loop, and none is left as a reduction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 60), nn.Tanh(), nn.Linear(60, 64)).double()
    x, y = torch.randn(5, 100, 64, dtype=torch.float64), torch.randn(5, 100, 64, dtype=torch.float64)
    step = psg_fx.transform(model, F.mse_loss, quantities=[Grads(), ClippedSum(BOUND)], backend="eager")
    found = step(x, y, groups=groups).clipped_sum
    _, grads = oracle.loop_grads(model, F.mse_loss, x, y)
    ids = torch.arange(5) if groups is None else groups
    summed = {name: torch.zeros_like(g[: int(ids.max()) + 1]).index_add(0, ids, g) for name, g in grads.items()}
    assert oracle.worst_error(found, oracle.clipped_sum(summed, BOUND)) < 1e-12
    nodes = step.graphs["tidied"].graph.nodes
    products = [n for n in nodes if n.target is aten.mm.default and n.meta.get("psg_fx_pass") == "totals"]
    assert len(products) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float16]))
def test_half_precision_is_squared_in_float32(dtype: torch.dtype) -> None:
    model, x, y = problem()
    model, x = model.to(dtype), x.to(dtype)
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    out = step(x, y)
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    assert out.norms.dtype is torch.float32
    assert oracle.relative_error(out.norms, oracle.norms(grads)) < 20 * torch.finfo(dtype).eps
    assert {value.dtype for value in out.clipped_sum.values()} == {dtype}


@pytest.mark.usefixtures("for_cuda")
def test_dtypes_that_differ() -> None:
    """A part of the model in float64: nothing is put side by side, and the norms are right."""
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.double_ = nn.Linear(4, 5), nn.Linear(5, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.double_(self.single(x).double())

    model, x, y = Mixed(), torch.randn(5, 4), torch.randint(3, (5,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    out = step(x, y)
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y, dtype=None)
    norms = torch.stack([g.double().flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    assert oracle.relative_error(out.norms, norms) < 1e-5
    assert not [n for n in step.graphs["tidied"].graph.nodes if n.meta.get("psg_fx_pass") == "totals"]


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled() -> None:
    """On a CPU small norms lie side by side too: a step for two sizes of batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(5, 7, 6), torch.randn(5, 7, 3)
    step = psg_fx.transform(model, F.mse_loss, quantities=ClippedSum(BOUND), dynamic=True)
    for batch in (5, 3):
        out = step(x[:batch], y[:batch])
        assert sums_to_samples(step) < len(out.clipped_sum)
        _, grads = oracle.loop_grads(model, F.mse_loss, x[:batch], y[:batch])
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-5
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, BOUND)) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("for_cuda")
def test_groups_of_samples() -> None:
    """The norms are of groups, whose number is no number of samples."""
    model, x, y = problem(6)
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(BOUND), backend="eager")
    ids = torch.tensor([0, 2, 1, 0, 2, 2])
    out = step(x, y, groups=ids, num_groups=3)
    assert [n for n in step.graphs["tidied"].graph.nodes if n.meta.get("psg_fx_pass") == "totals"]
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    of_groups = {name: torch.zeros(3, *g.shape[1:], dtype=g.dtype).index_add(0, ids, g) for name, g in grads.items()}
    assert oracle.relative_error(out.norms, oracle.norms(of_groups)) < 1e-5
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(of_groups, BOUND)) < 1e-4
