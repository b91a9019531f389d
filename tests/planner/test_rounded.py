"""Gradients that are kept in bfloat16 until the norms are known: the ops, when plans have them, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads, Gram, MeanGrad, Norms, Quantity, WeightedSum
from psg_fx.errors import BadArgument
from psg_fx.ops.products import products_here, tile_products
from psg_fx.planner import rates, search
from psg_fx.planner.expr import rounds
from psg_fx.planner.plan import PLAN, Plan, kept_until_norms
from psg_fx.torch_private import native
from support import oracle
from support.cases import CASES, Case
from support.selection import one_in

KEPT: dict[str, Any] = {"psg_fx.kept_dtype": torch.bfloat16}
UNIT = 2.0**-8
"""What an element may be off by, of itself."""


class Model(nn.Module):
    """Positions, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(12, 24, 3, padding=1)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).mT
        return (h + self.down(torch.tanh(self.up(h)))).mean(1)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(6, 12, 50), torch.randint(24, (6,))


@pytest.fixture
def waiting_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small gradients are kept, and what is kept has a price."""
    table = rates.device("cpu")
    fast = {kind: rate * 1e6 for kind, rate in table.flops.items()}
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: replace(table, flops=fast, kept=1e-9, launch=0.0))
    monkeypatch.setattr(search, "_LITTLE", 0)


def rounded(step: psg_fx.PerSampleModule) -> list[str]:
    """The gradients that are kept in bfloat16."""
    return [p.gradient.name for p in planned(step).parameters if any(rounds(part.tree) for part in p.parts)]


def planned(step: psg_fx.PerSampleModule) -> Plan:
    return PLAN.of(step.graphs["planned"])


def bounded(got: Mapping[str, Tensor], grads: Mapping[str, Tensor], bound: float) -> bool:
    """Whether no element is off by more than what rounding each sample's can do."""
    want, norms = oracle.clipped_sum(grads, bound), oracle.norms(grads)
    factors = (bound / norms).clamp(max=1)
    for name, gradient in grads.items():
        sizes = torch.einsum("b,b...->...", factors, gradient.abs())
        if not ((got[name] - want[name]).abs() <= 2 * UNIT * sizes + 1e-6).all():
            return False
    return True


@pytest.mark.slow
@pytest.mark.usefixtures("waiting_is_dear")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_clipped_sum(dynamic: bool) -> None:
    model, x, y = problem()
    step = psg_fx.transform(
        model, F.cross_entropy, quantities=ClippedSum(0.1), backend="eager", options=KEPT, dynamic=dynamic
    )
    for size in (6, 3, 1):
        out, (_, grads) = step(x[:size], y[:size]), oracle.loop_grads(model, F.cross_entropy, x[:size], y[:size])
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < UNIT
        assert bounded(out.clipped_sum, grads, 0.1)
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) > 1e-5  # it is rounded
    assert set(rounded(step)) >= {"up.weight", "down.weight"}
    assert "gradients are kept in bfloat16" in step.explain()


@pytest.mark.slow
@pytest.mark.usefixtures("waiting_is_dear")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_no_sample_is_above_the_bound(backend: str) -> None:
    """The norm is that of what is added up, also where one kernel could round and square."""
    model, x, y = problem()
    options = KEPT | {"psg_fx.fused_kernels": False}
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.1), backend=backend, options=options)
    for i in range(6):
        found = step(x[i : i + 1], y[i : i + 1]).clipped_sum
        norm = torch.stack([value.double().square().sum() for value in found.values()]).sum().sqrt()
        assert abs(norm.item() / 0.1 - 1) < 1e-6
    assert rounded(step)


@pytest.mark.usefixtures("waiting_is_dear")
@pytest.mark.parametrize(
    "quantities",
    [(Norms(),), (Grads(),), (WeightedSum(),), (MeanGrad(), Gram())],
    ids=lambda q: "+".join(type(each).__name__ for each in q),
)
def test_what_waits_for_no_norms_is_exact(quantities: tuple[Quantity, ...]) -> None:
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=quantities, backend="eager", options=KEPT)
    step(x, y, **({"weights": torch.ones(6)} if isinstance(quantities[0], WeightedSum) else {}))
    assert not rounded(step)
    assert "no gradient is kept in bfloat16" in step.explain()


STATE = "traps/counter"
"""A row whose answer is another one at every call."""
ROWS = [case for case in CASES if not case.refused and case.name != STATE]


@pytest.mark.usefixtures("waiting_is_dear")
@pytest.mark.filterwarnings("ignore:.*padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", one_in(20, ROWS, always={"linear/seq"}))
def test_every_row(case: Case) -> None:
    """Beside the same step without rounding; where a sum is of rounded gradients, so is the norm."""
    model = case.model(torch.float32)
    data = [value.float() if value.is_floating_point() else value for value in case.data()]
    found = []
    for options in (None, KEPT):
        step = psg_fx.transform(
            model,
            case.loss_fn(model),
            quantities=ClippedSum(0.01),
            backend="eager",
            batch_dim=case.dims,
            options=options,
        )
        torch.manual_seed(0)
        found.append(step(data))
    for parameter in planned(step).parameters:
        assert len([part for part in parameter.parts if rounds(part.tree)]) != 1
    exact, got = found
    assert oracle.worst_error(got.clipped_sum, exact.clipped_sum) < 2 * UNIT
    assert oracle.relative_error(got.norms, exact.norms) < 2 * UNIT


@pytest.mark.usefixtures("waiting_is_dear")
def test_gradients_that_are_asked_for_are_exact() -> None:
    model, x, y = problem()
    step = psg_fx.transform(
        model, F.cross_entropy, quantities=[Grads(), ClippedSum(0.1)], backend="eager", options=KEPT
    )
    out, (_, grads) = step(x, y), oracle.loop_grads(model, F.cross_entropy, x, y)
    assert oracle.worst_error(out.grads, grads) < 1e-5
    assert bounded(out.clipped_sum, grads, 0.1)


@pytest.mark.usefixtures("waiting_is_dear")
def test_float64_is_left_as_it_is() -> None:
    model, x, y = problem()
    step = psg_fx.transform(model.double(), F.cross_entropy, quantities=ClippedSum(0.1), backend="eager", options=KEPT)
    out, (_, grads) = step(x.double(), y), oracle.loop_grads(model, F.cross_entropy, x.double(), y)
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-10
    assert not rounded(step)


@pytest.mark.usefixtures("waiting_is_dear")
def test_a_sample_that_is_no_number_is_left_out() -> None:
    model, x, y = problem()
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.1), backend="eager", options=KEPT)
    want = step(x[1:], y[1:]).clipped_sum
    x[0, 0, 0] = torch.nan
    out = step(x, y)
    assert oracle.worst_error(out.clipped_sum, want) < 1e-6
    assert rounded(step)


@pytest.mark.usefixtures("waiting_is_dear")
def test_half_as_much_waits() -> None:
    model, x, y = problem()
    waiting = []
    for options in (None, KEPT):
        step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(0.1), backend="eager", options=options)
        step(x, y)
        trees = [part.tree for p in planned(step).parameters if p.gradient.name == "up.weight" for part in p.parts]
        waiting.append(max(sum(kept_until_norms(tree).values()) for tree in trees))
    assert waiting[1] == waiting[0] / 2 == 6 * 24 * 40 * 2


@pytest.mark.parametrize("value", [torch.float16, "bfloat16", torch.float32])
def test_other_dtypes_are_refused(value: object) -> None:
    with pytest.raises(BadArgument, match=r"torch\.bfloat16"):
        psg_fx.transform(Model(), F.cross_entropy, options={"psg_fx.kept_dtype": value})


@pytest.mark.slow
@pytest.mark.inductor
def test_a_compiled_step() -> None:
    """In C++, with more positions than features, so that products take less than Gram matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 96))
    x, y = torch.randn(6, 300, 96), torch.randn(6, 300, 96)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    step = psg_fx.transform(model, loss, quantities=ClippedSum(0.01), backend="inductor", options=KEPT, dynamic=True)
    for size in (6, 3):
        out, (_, grads) = step(x[:size], y[:size]), oracle.loop_grads(model, loss, x[:size], y[:size])
        assert bounded(out.clipped_sum, grads, 0.01)
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < UNIT
    nodes = [node for node in step.graphs["tidied"].graph.nodes if "products_here" in str(node.target)]
    assert [node.args[2] for node in nodes] == [True, True]


SHAPES = [(3, 70, 50, 90), (1, 1, 1, 1), (2, 13, 3, 20), (5, 3, 200, 30), (2, 5, 256, 4160)]
"""Samples, places that are summed, rows and columns; the last product is written past the caches."""


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op_in_cpp(shape: tuple[int, int, int, int], compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    native.begin(products_here.LIBRARY)
    native.finish()
    assert native.library(products_here.LIBRARY) is not None
    if not compiled:
        monkeypatch.setattr(products_here, "library", lambda name: None)
    n, t, i, o = shape
    torch.manual_seed(0)
    x, y = torch.randn(n, t, i), torch.randn(n, t, o)
    exact = products_here.products(x, y)[0].double()
    product, squares = products_here.products(x, y, rounded=True)
    assert product.dtype is torch.bfloat16
    assert ((product - exact).abs() <= (UNIT + 1e-5) * exact.abs() + 1e-6).all()
    assert oracle.relative_error(squares, product.double().square().sum((1, 2))) < 1e-6


def test_what_is_no_number_is_none_in_bfloat16() -> None:
    values = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 3.39e38, 0.0]).repeat(8)
    values.view(torch.int32)[[6, 7]] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)
    native.begin(products_here.LIBRARY)
    native.finish()
    product, squares = products_here.products(values[None, None], torch.ones(1, 1, 40), rounded=True)
    assert product[0].isnan().all(1).tolist() == values.isnan().tolist()
    numbers = ~values.isnan()
    assert torch.equal(product[0, numbers], values[numbers, None].bfloat16().expand(-1, 40))
    assert squares.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_for_a_device(dtype: torch.dtype) -> None:
    """As plain torch: the squares are those of what is kept."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 70, 20).to(dtype), torch.randn(3, 20, 90).to(dtype)
    product, squares = tile_products.tile_product(a, b, torch.bfloat16)
    exact = a.double() @ b.double()
    assert product.dtype is torch.bfloat16
    assert ((product - exact).abs() <= (UNIT + 1e-5) * exact.abs() + 1e-5).all()
    assert oracle.relative_error(squares.sum(1), product.double().square().sum((1, 2))) < 1e-6
