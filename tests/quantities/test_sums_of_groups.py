"""Gradients of groups of samples: the sums of those that a float64 loop finds for single samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum
from psg_fx.planner.plan import PLAN
from psg_fx.step import groups as of_call
from support import oracle
from support.cases import CASES, Case
from support.expected import BOUND, Truth, compare, directions, tolerance_of
from support.selection import one_in, selected
from support.small import same_mlp

ROWS = {case.name: case for case in CASES}
FEW = [
    "linear/2d", "linear/folded-time-major", "einsum/heads", "conv1d/plain", "conv2d/groups", "conv2d/folded-windows",
    "conv_transpose1d/stride", "embedding/padding", "embedding/tied-head", "layer_norm/seq", "batch_norm/eval-images",
    "prefix/weight-norm", "uses/straight-and-transposed", "uses/unused", "layers/lstm",
]  # fmt: skip
LAYOUTS: dict[str, tuple[list[int], bool]] = {
    "gathered": ([1, 0, 1], False), "one-block": ([0, 0, 0], False), "some-apart": ([-1, 2, 2], False),
    "scattered": ([1, 0, 1], True), "scattered-apart": ([-1, 2, 2], True),
}  # fmt: skip
"""Groups of the three samples of a row, and whether their rows stay where they are."""


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From here on no rows are brought in order of their groups, as if that took too much memory."""

    def scatter() -> None:
        monkeypatch.setattr(of_call, "fits_in_order", lambda places, rows: not places)

    return scatter


def summed(grads: oracle.Grads, ids: Tensor, count: int) -> oracle.Grads:
    """The gradients of groups; a sample of group -1 is in none."""
    return {n: torch.stack([g[ids == u].sum(0) for u in range(count)]) for n, g in grads.items()}


class GroupTruth(Truth):
    """What a row's quantities should be for groups of its samples."""

    def __init__(self, case: Case, ids: list[int]) -> None:
        super().__init__(case)
        self.samples, count = self.grads, max(ids) + 1
        self.grads = summed(self.samples, torch.tensor(ids), count)
        self.norms, self.own = oracle.norms(self.grads), oracle.parameter_norms(self.grads)
        self.bound = BOUND * self.norms.max().item()
        self.weights = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)[:count]

    def expected(self, field: str, quantity: Any) -> Tensor | dict[str, Tensor]:
        return oracle.mean_grad(self.samples) if field == "mean_grad" else super().expected(field, quantity)


def asked(bound: float, centered: bool = True) -> list[Any]:
    """Every quantity at once."""
    return [
        Grads(), Norms(), ClippedSum(bound), WeightedSum(), MeanGrad(), Dots(count=2), Gram(),
        SecondMoment(centered), Projection(rank=2),
    ]  # fmt: skip


def layout_of(step: Any) -> str:
    return str(PLAN.of(step.graphs["planned"]).grouping.layout)


def check_row(case: Case, ids: list[int]) -> str:
    """Every quantity of groups of the row's samples; how these were laid out."""
    truth = GroupTruth(case, ids)
    quantities = asked(truth.bound, centered=max(ids) > 0)  # of one group, the variance is 0
    model = case.model()
    step = psg_fx.transform(model, case.loss_fn(model), quantities=quantities, backend="eager", batch_dim=case.dims)
    out = step(case.data(), groups=ids, weights=truth.weights, directions=directions(truth.grads, 2))
    compare(out, truth, quantities, tolerance_of(case))
    return layout_of(step)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", selected([case for case in CASES if not case.refused], FEW[::8]))
def test_row(case: Case) -> None:
    """Every row and every quantity, at numbers of groups and of samples that the graph was not traced with."""
    assert check_row(case, [1, 0, 1]) == "gathered"


@pytest.mark.parametrize(
    ("row", "layout"),
    one_in(15, [(row, name) for row in FEW for name in LAYOUTS if name != "gathered"], kinds=False),
)
def test_layout(row: str, layout: str, scattered: Callable[[], None]) -> None:
    ids, apart = LAYOUTS[layout]
    if apart:
        scattered()
    expected = {"one-block": "blocks", "some-apart": "gathered"}.get(layout, "scattered")
    assert check_row(ROWS[row], ids) == expected


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator).double(), torch.randint(3, (size,), generator=generator)


def compare_mlp(step: Any, model: nn.Module, ids: list[int], count: int | None = None) -> None:
    """All quantities of the small model that the step is asked for; norms, a clipped sum and a Gram matrix always."""
    x, y = batch(len(ids))
    total = max(ids) + 1 if count is None else count
    weights = torch.linspace(-1, 2, total, dtype=torch.float64)
    losses, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    of_groups, vs = summed(grads, torch.tensor(ids), total), directions(grads, None)
    fields = {quantity.field for quantity in step.quantities}
    more = {"weights": weights, "directions": vs} if "dots" in fields else {}
    out = step(x, y, groups=torch.tensor(ids), num_groups=count, **more)
    by_name = {
        "grads": of_groups, "clipped_sum": oracle.clipped_sum(of_groups, 0.3), "mean_grad": oracle.mean_grad(grads),
        "weighted_sum": oracle.weighted_sum(of_groups, weights),
        "second_moment": oracle.second_moment(of_groups, centered=True),
    }  # fmt: skip
    for field in fields & set(by_name):
        torch.testing.assert_close(dict(getattr(out, field)), by_name[field], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(out.losses, losses)
    torch.testing.assert_close(out.norms, oracle.norms(of_groups))
    torch.testing.assert_close(out.clip_factors, oracle.clip_factors(oracle.norms(of_groups), 0.3))
    torch.testing.assert_close(out.gram, oracle.gram(of_groups), atol=1e-9, rtol=1e-9)
    if "dots" in fields:
        torch.testing.assert_close(out.dots, oracle.dots(of_groups, vs), atol=1e-9, rtol=1e-9)
        assert out.projection.shape[0] == total


EVERYTHING = [
    Grads(), Norms(), ClippedSum(0.3), WeightedSum(), MeanGrad(), Dots(), Gram(), SecondMoment(centered=True),
    Projection(rank=2),
]  # fmt: skip

CROSS = [Grads(), Norms(), ClippedSum(0.3), MeanGrad(), Gram()]
"""Those that read gradients, norms, sums before and after the norms, and pairs."""

SIZES: list[tuple[list[int], int | None]] = [
    ([0, 0, 1, 1, 2, 2], None), ([0] * 3 + [1] * 3, None), ([0, 1, 2, 3, 4], None), ([0] * 4, None),
    ([1, 0, 1, 1, 2, -1], None), ([1, 0, 1, 1, 2, -1, 0, 4, 4], 7), ([5, 5, 2, 2], 8), ([-1, -1, -1], 3),
    ([1000, 7, 7], None), ([0] * 12 + [1, 2, 3, 4, 5, 6, 7, 8], None), ([3] * 9 + [-1, 1, 2, 0, 4, 5, 6, 7], 9),
]  # fmt: skip


@pytest.mark.parametrize("number", one_in(len(SIZES), range(len(SIZES))))
def test_sizes_and_numbers(number: int) -> None:
    """Any numbers of groups, of their samples, and of groups without any, each as the first of a step."""
    model, (ids, count) = same_mlp(), SIZES[number]
    compare_mlp(psg_fx.transform(model, F.cross_entropy, quantities=EVERYTHING, backend="eager"), model, ids, count)


@pytest.mark.slow
def test_one_capture_serves_all_sizes() -> None:
    """One graph for blocks, one for what is brought in order, one for what is not; none depends on a size."""
    model = same_mlp()
    step = psg_fx.transform(model, F.cross_entropy, quantities=EVERYTHING, backend="eager")
    for ids, count in SIZES:
        compare_mlp(step, model, ids, count)
    step(
        *batch(5), weights=torch.ones(5), directions=directions({n: p[None] for n, p in model.named_parameters()}, None)
    )
    assert len(step.captures) == 4
    for ids, count in reversed(SIZES):
        compare_mlp(step, model, ids, count)
    assert len(step.captures) == 4


@pytest.mark.rest  # test_compiled_once of tests/ragged has groups and rows
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "asked"),
    [("aot_eager", CROSS), *(pytest.param(b, EVERYTHING, marks=pytest.mark.rest) for b in ("aot_eager", "inductor"))],
    ids=["aot_eager-few", "aot_eager", "inductor"],
)
@pytest.mark.parametrize("layout", one_in(3, ["gathered", "blocks", "scattered"]))
def test_compiled_once_for_all_sizes(
    layout: str, backend: str, asked: list[Any], scattered: Callable[[], None]
) -> None:
    """With dynamic=True one graph is compiled; numbers of 2 and more, as of samples."""
    sizes = {
        "blocks": [[0, 0, 1, 1, 2, 2], [0] * 3 + [1] * 3, [0] * 4 + [1] * 4 + [2] * 4],
        "gathered": [[0, 1, 0, -1, 2, 2], [1, 0, 1, 0], [2, 0, 1, 1, -1, 2, 2, 3]],
        "scattered": [[0, 1, 0, -1, 2, 2], [1, 0, 1, 0], [2, 0, 1, 1, -1, 2, 2, 3]],
    }[layout]
    if layout == "scattered":
        scattered()
    model = same_mlp()
    step = psg_fx.transform(model, F.cross_entropy, quantities=asked, dynamic=True, backend=backend)
    compare_mlp(step, model, sizes[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for ids in sizes[1:]:
            compare_mlp(step, model, ids)
    assert layout_of(step) == layout


class Mixed(nn.Module):
    """A convolution, a norm, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        image = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head((image + self.embed(ids)).tanh()).mean(1)


class Embedded(nn.Module):
    """Positions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head((x.flatten(2).transpose(1, 2) + self.embed(ids)).tanh()).mean(1)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("make", "ids"),
    [
        pytest.param(Embedded, [0, 0, 0, 1], id="scattered"),
        pytest.param(Mixed, [0, 0, 1, 1], id="blocks", marks=pytest.mark.rest),
        pytest.param(Mixed, [1, 0, 1, -1], id="gathered", marks=pytest.mark.rest),
        pytest.param(Mixed, [0, 0, 0, 1], id="mixed-scattered", marks=pytest.mark.rest),
    ],
)
def test_inductor(
    make: type[nn.Module], ids: list[int], scattered: Callable[[], None], request: pytest.FixtureRequest
) -> None:
    if "scattered" in request.node.name:
        scattered()
    torch.manual_seed(0)
    model, x = make().double(), (torch.randn(4, 2, 4, 4).double(), torch.randint(5, (4, 16)))
    y = torch.tensor([0, 1, 2, 1])
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    of_groups = summed(grads, torch.tensor(ids), 2)
    bound = oracle.norms(of_groups).median().item()
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), ClippedSum(bound), MeanGrad()])
    out = step(x, y, groups=ids)
    assert oracle.worst_error(out.grads, of_groups) < 1e-10
    assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(of_groups, bound)) < 1e-10
    assert oracle.worst_error(out.mean_grad, oracle.mean_grad(grads)) < 1e-10


@pytest.mark.parametrize("rows", ["gathered", "scattered"])
def test_what_is_not_finite_stays_in_its_group(rows: str, scattered: Callable[[], None]) -> None:
    """The group of a sample whose gradient is NaN is left out of the sum, and no other is."""
    if rows == "scattered":
        scattered()
    model, (x, y), bad = same_mlp(), batch(9), 3
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Norms(), ClippedSum(0.3)], backend="eager")
    broken = x.clone()
    broken[bad] = float("nan")
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    for ids in ([2, 2, 0, 1, 1, -1, 4, 4, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2], [0] * 9, [3, 3, 0, -1, 1, 2, 2, 1, 1]):
        out = step(broken, y, groups=ids, num_groups=6)
        of_groups = summed(grads, torch.tensor(ids), 6)
        if ids[bad] >= 0:
            of_groups = {n: torch.cat([g[: ids[bad]], g[ids[bad] + 1 :]]) for n, g in of_groups.items()}
        assert (~out.norms.isfinite()).nonzero().flatten().tolist() == [u for u in [ids[bad]] if u >= 0]
        torch.testing.assert_close(dict(out.clipped_sum), oracle.clipped_sum(of_groups, 0.3))


@pytest.mark.parametrize("rows", ["blocks", "gathered", "scattered"])
def test_rounding_cannot_hide_a_group(rows: str, scattered: Callable[[], None]) -> None:
    """Two samples with opposite gradients, up to a rest that is lost in the Gram matrices of their rows: the clipped
    part is held down all the same.
    """
    if rows == "scattered":
        scattered()
    torch.manual_seed(0)
    model, line, target = nn.Linear(2000, 1000, bias=False), torch.randn(2000), torch.randn(1000)
    x, y = torch.stack([line, line * (1 + 1e-5)]), torch.stack([target, -target])
    step = psg_fx.transform(model, lambda out, y: 1e3 * (out * y).sum(), quantities=ClippedSum(1e-3), backend="eager")
    ids = [0, 0] if rows == "blocks" else [1, 1]
    part = step(x, y, groups=ids).clipped_sum["weight"]
    assert layout_of(step) == rows
    assert part.norm() <= 2**0.5 * 1e-3 * 1.001
