"""`psg_fx.validation` accepts right answers, names the wrong ones, and its loop agrees with the tests' own oracle."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import zoo
from psg_fx.errors import BadArgument
from psg_fx.reference.batch import Batch
from psg_fx.reference.by_vmap import vmap_reference
from psg_fx.reference.definitions import GRADS, LOSSES, MEAN_GRAD, clipped_sum_check, definitions_for, norms_check
from psg_fx.reference.loop import draws_random_numbers, reference_grads
from psg_fx.reference.validate import validate
from support import oracle

CHECKS = (LOSSES, GRADS, norms_check(), clipped_sum_check(0.5), MEAN_GRAD)


class Honest:
    """A step that answers every check by the oracle in the model's own dtype; `spoil` may change the gradients."""

    def __init__(self, ex: zoo.Example) -> None:
        self.ex = ex

    def spoil(self, grads: oracle.Grads) -> None:
        pass

    def __call__(self, inputs: Any, targets: Any) -> SimpleNamespace:
        ex = self.ex
        losses, grads = oracle.loop_grads(ex.model, ex.loss_fn, inputs, targets, batch_dim=ex.batch_dim, dtype=None)
        self.spoil(grads)
        return SimpleNamespace(
            losses=losses,
            grads=grads,
            norms=oracle.norms(grads),
            clipped_sum=oracle.clipped_sum(grads, 0.5),
            mean_grad=oracle.mean_grad(grads),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_right_answers_are_ok(name: str, dtype: torch.dtype) -> None:
    ex = zoo.example(name, batch=3, dtype=dtype)
    report = validate(Honest(ex), ex.model, ex.loss_fn, ex.inputs, ex.targets, checks=CHECKS)
    assert report.ok, str(report)
    assert str(report).startswith("ok: ")


class WrongSample(Honest):
    def spoil(self, grads: oracle.Grads) -> None:
        grads["fc2.weight"][2] *= 1.05


class Missing(Honest):
    def spoil(self, grads: oracle.Grads) -> None:
        del grads["fc2.weight"]


class WrongShape(Honest):
    def spoil(self, grads: oracle.Grads) -> None:
        grads["fc2.weight"] = grads["fc2.weight"][:, :1]


class NotANumber(Honest):
    def spoil(self, grads: oracle.Grads) -> None:
        grads["fc2.weight"][2, 0, 0] = float("nan")


@pytest.mark.parametrize(
    ("spoiler", "verdict", "sample"),
    [
        (WrongSample, "WRONG", 2),
        (NotANumber, "WRONG", 2),
        (Missing, "missing", None),
        (WrongShape, "wrong shape", None),
    ],
)
def test_a_wrong_answer_is_named(spoiler: type[Honest], verdict: str, sample: int | None) -> None:
    ex = zoo.example("mlp", batch=4)
    report = validate(spoiler(ex), ex.model, ex.loss_fn, ex.inputs, ex.targets)
    assert not report.ok
    bad = [row for row in report.rows if row.verdict != "ok"]
    assert [(row.parameter, row.verdict, row.worst_sample) for row in bad] == [("fc2.weight", verdict, sample)]
    assert str(report).startswith("WRONG: 1 of 7 answers disagree")
    assert report.worst.parameter == "fc2.weight"


def test_a_random_model_is_refused() -> None:
    ex = zoo.example("encoder", batch=2, dropout=0.5)
    with pytest.raises(BadArgument, match="draws random numbers"):
        validate(Honest(ex), ex.model, ex.loss_fn, ex.inputs, ex.targets)


def test_rounding_that_differs_between_two_runs_is_not_random() -> None:
    """As where a library adds up in another order."""
    x, y, runs = torch.randn(2, 3), torch.randn(2, 2), itertools.count()
    for off, random in ((2**-22, False), (2**-10, True)):
        noisy = draws_random_numbers(
            nn.Linear(3, 2), lambda out, y, off=off: F.mse_loss(out, y) * (1 + off * (next(runs) % 2)), x, y
        )
        assert noisy is random


class Shared(nn.Module):
    """Keyword inputs, one of them shared by all samples, a buffer that forward changes, an unused parameter."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.linear(x) * scale * self.count


def test_loop_agrees_with_the_oracle_and_leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    model = Shared()
    weight = model.linear.weight

    def loss_fn(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (output - wanted).square().mean() + 0.1 * weight.square().sum()

    inputs, targets = {"x": torch.randn(5, 4), "scale": torch.rand(3)}, torch.randn(3, 5)
    options: dict[str, Any] = {"batch_dim": ({"x": 0, "scale": None}, 1)}

    def turned(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return loss_fn(output, wanted.t())

    before = {name: (t, t.clone()) for name, t in model.state_dict().items()}
    losses, grads = reference_grads(model, turned, inputs, targets, **options)
    expected_losses, expected = oracle.loop_grads(model, turned, inputs, targets, **options)
    assert oracle.relative_error(losses, expected_losses) == 0
    assert oracle.worst_error(grads, expected) == 0
    assert grads["unused"].abs().max() == 0
    assert grads["linear.weight"].dtype == torch.float64
    for name, t in model.state_dict().items():
        assert t.data_ptr() == before[name][0].data_ptr(), name
        assert torch.equal(t, before[name][1]), name
    assert model.linear.weight is weight


class Recording(nn.Module):
    """Doubles its layer's output by a hook that it registers when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "recording", False):
            self.layer.register_forward_hook(lambda module, inputs, output: 2 * output)
            self.recording = True
        return self.layer(x)  # type: ignore[no-any-return]


def test_hooks_that_the_code_registers_are_taken_back_as_its_attributes_are() -> None:
    model, x, y = Recording(), torch.randn(3, 4), torch.tensor([0, 2, 1])
    losses, _ = reference_grads(model, F.cross_entropy, x, y)
    assert not model.layer._forward_hooks
    assert torch.allclose(losses.float(), F.cross_entropy(2 * model.layer(x), y, reduction="none"), atol=1e-5)


def test_batch_norm_of_one_sample_whose_gradient_lies_transposed() -> None:
    """The loss of a sample twice is that of the sample: torch's backward is right for two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).eval().double()
    w, x = torch.randn(8, 5, dtype=torch.float64), torch.randn(2, 3, 4, 4, dtype=torch.float64)

    def loss_fn(output: Tensor) -> Tensor:
        return (output.flatten(2).transpose(1, 2) @ w).tanh().mean()

    _, grads = reference_grads(model, loss_fn, x)
    for i in range(2):
        twice = torch.autograd.grad(loss_fn(model(torch.cat([x[i : i + 1]] * 2))), list(model.parameters()))
        for (name, grad), want in zip(grads.items(), twice, strict=True):
            assert torch.allclose(grad[i], want, atol=1e-12), name


def test_vmap_reference_agrees_with_the_loop() -> None:
    ex = zoo.example("encoder", batch=3, dtype=torch.float64, batch_first=False)
    call = (ex.model, ex.loss_fn, ex.inputs, ex.targets)
    losses, grads = reference_grads(*call, batch_dim=ex.batch_dim)
    by_vmap_losses, by_vmap = vmap_reference(*call, batch_dim=ex.batch_dim)
    assert oracle.relative_error(by_vmap_losses, losses) < 1e-12
    assert oracle.worst_error(by_vmap, grads) < 1e-12


@pytest.mark.parametrize(
    ("inputs", "targets", "batch_dim", "why"),
    [
        (torch.ones(3, 2), torch.ones(4), 0, r"the tensors have \[3, 4\] samples"),
        (torch.ones(3, 2), None, 5, r"a tensor of shape \(3, 2\) has no dim 5"),
        (torch.ones(3, 2), None, None, "no tensor carries samples"),
        ((torch.ones(3),), None, ((0, 0), None), "inputs is a tuple, its batch_dim is"),
        (torch.ones(3), None, (0, 0, 0), "batch_dim has 3 parts"),
    ],
)
def test_a_batch_dim_that_does_not_fit_is_refused(inputs: Any, targets: Any, batch_dim: Any, why: str) -> None:
    with pytest.raises(BadArgument, match=why):
        Batch.of(inputs, targets, batch_dim)


def quantity(field: str, **settings: Any) -> SimpleNamespace:
    return SimpleNamespace(field=field, **settings)


def test_checks_of_every_quantity_agree_with_the_oracle() -> None:
    ex = zoo.example("mlp", batch=3, dtype=torch.float64)
    losses, grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets)
    weights = torch.rand(3, dtype=torch.float64)
    directions = {name: torch.randn(2, *g.shape[1:], dtype=torch.float64) for name, g in grads.items()}
    own, whole = oracle.parameter_norms(grads), oracle.norms(grads)
    limits = {name: n.mean().item() for name, n in own.items()}
    limit = whole.median().item()
    rows: list[tuple[SimpleNamespace, list[Any]]] = [
        (quantity("grads"), [losses, grads]),
        (quantity("norms", per="model", squared=True), [losses, whole**2]),
        (quantity("norms", per="parameter", squared=False), [losses, own]),
        (
            quantity("clipped_sum", max_norm=limit, per="model", style="abadi", weighted=False),
            [losses, whole, oracle.clip_factors(whole, limit), oracle.clipped_sum(grads, limit)],
        ),
        (
            quantity("clipped_sum", max_norm=limits, per="parameter", style="abadi", weighted=False),
            [
                losses,
                own,
                {n: oracle.clip_factors(own[n], limits[n]) for n in own},
                oracle.clipped_sum_per_parameter(grads, limits),
            ],
        ),
        (
            quantity("clipped_sum", max_norm=torch.tensor(0.5), per="model", style="automatic", weighted=False),
            [losses, whole, 0.5 / (whole + 0.01), oracle.weighted_sum(grads, 0.5 / (whole + 0.01))],
        ),
        (quantity("weighted_sum"), [losses, oracle.weighted_sum(grads, weights)]),
        (quantity("mean_grad"), [losses, oracle.mean_grad(grads)]),
        (quantity("dots"), [losses, oracle.dots(grads, directions)]),
        (quantity("gram"), [losses, oracle.gram(grads)]),
        (quantity("second_moment", centered=True), [losses, oracle.second_moment(grads, centered=True)]),
    ]
    for asked, answers in rows:
        checks, notes = definitions_for([asked], {"weights": weights, "directions": directions})
        assert not notes
        for check, answer in zip(checks, answers, strict=True):
            got = check.expected(losses, grads)
            if isinstance(answer, torch.Tensor):
                assert isinstance(got, torch.Tensor)
                got, answer = {"": got}, {"": answer}
            assert oracle.worst_error(dict(got), answer) < 1e-12, check.field


def test_a_quantity_without_a_formula_is_mentioned() -> None:
    checks, notes = definitions_for([quantity("own"), quantity("grads")])
    assert [check.field for check in checks] == ["losses", "grads"]
    assert notes == ["not checked: own has no formula to hold it against"]


def test_projections_are_checked_by_their_matrices() -> None:
    ex = zoo.example("mlp", batch=3, dtype=torch.float64)
    _, grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs, ex.targets)
    asked = psg_fx.Projection(rank=2, seed=1)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=asked, backend="eager")
    assert "projection" in str(step.validate(ex.inputs, ex.targets))
    found = step(ex.inputs, ex.targets).projection
    for seed, same in ((1, True), (2, False)):
        (_, check), _ = definitions_for([psg_fx.Projection(rank=2, seed=seed)])
        want = check.expected(torch.empty(0), grads)
        assert isinstance(want, torch.Tensor)
        assert (oracle.relative_error(found, want) < 1e-12) is same


def test_weights_of_a_clipped_sum_are_checked() -> None:
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 2), torch.tensor([0.0, 1.0, 2.5])
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.ClippedSum(0.5, weighted=True), backend="eager")
    report = step.validate(torch.randn(3, 3), torch.tensor([0, 1, 1]), weights=weights)
    assert report.ok, report


X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 0, 1])
SEVERAL = torch.tensor([[0, 1], [1, -100], [2, 2], [0, -100], [0, 1], [-100, 1]])


def per_token(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out[:, None].expand(-1, 2, -1).flatten(0, 1), y.flatten())


BATCH_LOSSES: dict[str, tuple[Any, Tensor, str]] = {
    "mean": (F.cross_entropy, Y, ""),
    "per-sample": (lambda out, y: F.cross_entropy(out, y, reduction="none"), Y, ""),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), Y, "is the sum of its samples' losses: its p.grad is 6 · mean_grad"),
    "class-weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), Y, "is not the mean of its samples'"),
    "ignored-tokens": (per_token, SEVERAL, "is not the mean of its samples' losses"),
    "runs-on-one-only": (lambda out, y: F.cross_entropy(out.reshape(1, 3), y), Y, ""),
}


@pytest.mark.parametrize("name", BATCH_LOSSES)
def test_a_loss_that_is_not_the_mean_of_its_samples_is_mentioned(name: str) -> None:
    """And is not counted as an error: `mean_grad` is what it is defined to be."""
    loss_fn, y, words = BATCH_LOSSES[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    losses, grads = reference_grads(model, loss_fn, X, y)
    out = SimpleNamespace(losses=losses, mean_grad=oracle.mean_grad(grads))
    report = validate(lambda *batch: out, model, loss_fn, X, y, checks=(LOSSES, MEAN_GRAD))
    assert report.ok, report
    assert len(report.notes) == bool(words)
    assert words in str(report)
    if not words and name != "runs-on-one-only":
        found = torch.autograd.grad(loss_fn(model(X), y).mean(), [model.weight])
        torch.testing.assert_close(found[0], out.mean_grad["weight"].float())


def test_gradients_that_torch_has_sparse() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    assert step.validate(torch.randint(7, (4, 3)), torch.randint(3, (4,))).ok


class SingleInside(nn.Module):
    """Normalises in float32, as many language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.last(h.to(x.dtype))  # type: ignore[no-any-return]


def test_a_model_in_float64_that_computes_in_float32_inside_is_held_to_that() -> None:
    torch.manual_seed(0)
    model, x, y = SingleInside().double(), torch.randn(7, 8, dtype=torch.float64), torch.randint(4, (7,))
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    assert step.validate(x, y).ok
    ex = SimpleNamespace(model=model, loss_fn=F.cross_entropy, inputs=x, targets=y, batch_dim=0)

    class Wrong(Honest):
        def spoil(self, grads: oracle.Grads) -> None:
            grads["last.weight"][3] *= 1 + 1e-4

    report = validate(Wrong(ex), model, F.cross_entropy, x, y)
    assert [(row.parameter, row.worst_sample) for row in report.rows if row.verdict == "WRONG"] == [("last.weight", 3)]
