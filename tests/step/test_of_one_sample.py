"""The first answer of a graph is held against the user's own code on one sample."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx

X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
drawn = functools.partial(random.random)


class Changed(nn.Module):
    """A layer, and what is made of its outputs; counts its runs in a buffer, and in a list."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.change(self.layer(x))


def of_a_type(h: Tensor) -> Tensor:
    return h if type(h) is Tensor else h * 3


def of_symbols(h: Tensor) -> Tensor:
    return h * 2 if isinstance(h.shape[0], torch.SymInt) else h


def of_a_draw(h: Tensor) -> Tensor:
    return h * 10 ** (5 * drawn())


@pytest.mark.parametrize("change", [of_a_type, of_symbols, of_a_draw], ids=lambda f: f.__name__)
def test_what_no_op_shows_is_refused_at_every_call(change: Callable[[Tensor], Tensor]) -> None:
    random.seed(0)
    torch.manual_seed(0)
    model = Changed(change)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    for _ in range(2):
        with pytest.raises(psg_fx.NotYetSupported, match=r"the loss of sample 4 is .* alone, and .* in this batch"):
            step(X, Y)
    assert model.runs == 0  # neither the step nor the sample alone leaves anything


@pytest.mark.parametrize("change", [of_a_type, of_symbols, of_a_draw], ids=lambda f: f.__name__)
@pytest.mark.parametrize("returned", [lambda h: {"labels": h.argmax(1), "turned": h.T}, lambda h: (h, h[:, 0])])
def test_without_a_loss_the_outputs_are_compared(
    change: Callable[[Tensor], Tensor], returned: Callable[[Tensor], object]
) -> None:
    random.seed(0)
    torch.manual_seed(0)
    model = Changed(lambda h: returned(change(h)))  # type: ignore[arg-type,return-value]
    step = psg_fx.transform(model, backend="eager")
    for _ in range(2):
        with pytest.raises(psg_fx.NotYetSupported, match=r"a number of the output for sample 4 is .* alone, and .* in"):
            step(X)
    assert model.runs == 0
    assert model.layer.weight.grad is None


def test_outputs_without_one_dim_of_samples_are_left_alone() -> None:
    """Rows of all samples in one dim, labels, a table of the model's, the batch size as a number."""

    def several(h: Tensor) -> object:
        table = torch.arange(5.0)
        return h, torch.cat([h, h]).view(-1, 3), h.argmax(1), table, 2 * h.shape[0]

    step = psg_fx.transform(Changed(several), backend="eager")  # type: ignore[arg-type]
    step(X)[0].sum().backward()
    assert step.model.layer.weight.grad_sample.shape == (5, 3, 4)


def test_a_call_after_one_that_failed_is_another_one() -> None:
    """What fails behind the capture leaves no loss of its sample to be compared."""
    model = Changed(torch.tanh)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.WeightedSum(), backend="eager")
    with pytest.raises(psg_fx.BadArgument, match="weights have shape"):
        step(X, Y, weights=torch.ones(4))
    with torch.no_grad():
        model.layer.weight.mul_(3.0)
    assert step(X.flip(0) * 5, Y, weights=torch.ones(5)).losses.isfinite().all()


def test_a_squeeze_of_which_the_dims_are_asked_is_refused_by_name() -> None:
    step = psg_fx.transform(Changed(lambda h: h * 3 if h[:, :1].squeeze().dim() == 1 else h), F.cross_entropy)
    with pytest.raises(psg_fx.NotYetSupported, match="squeeze treats a batch of one sample differently"):
        step(X, Y)


def test_it_can_be_switched_off() -> None:
    options = {"psg_fx.compare_first": False}
    step = psg_fx.transform(Changed(of_a_type), F.cross_entropy, backend="eager", options=options)
    assert step(X, Y).losses.shape == (5,)
    assert psg_fx.transform(Changed(of_a_type), backend="eager", options=options)(X).shape == (5, 3)


@pytest.mark.parametrize("budget", [None, 4_000])
def test_the_code_runs_once_more_and_leaves_nothing(budget: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def noted(h: Tensor) -> Tensor:
        if type(h.shape[0]) is int:
            print("alone")
            seen.append(h.shape[0])
        return h.tanh()

    model = Changed(noted)
    step = psg_fx.transform(
        model, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager", dynamic=True, memory_budget=budget
    )
    before = random.getstate(), torch.get_rng_state()
    for size in (5, 3):
        assert step(X[:size], Y[:size]).losses.shape == (size,)
    assert (random.getstate(), torch.get_rng_state().tolist()) == (before[0], before[1].tolist())
    assert not seen
    assert "alone" not in capsys.readouterr().out


def test_weights_that_autocast_has_cast_are_not_kept_for_the_caller() -> None:
    model = Changed(torch.tanh)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        step(X, Y)
        with torch.no_grad():
            model.layer.weight.add_(1.0)
        seen = model(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(seen, model(X))


def test_parts_that_are_compiled_run_as_they_are_written() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0] = torch.compile(model[0])
    compiled = torch._dynamo.utils.counters["stats"]
    before = dict(compiled)
    step = psg_fx.transform(model, torch.compile(F.cross_entropy), quantities=psg_fx.Norms(), backend="eager")
    losses = F.cross_entropy(model[1](model[0]._orig_mod(X)), Y, reduction="none")
    torch.testing.assert_close(step(X, Y).losses, losses)
    assert dict(compiled) == before


def test_rounding_is_no_difference() -> None:
    """Terms of 10^6 that cancel: float32 leaves the loss a few digits."""
    model = Changed(lambda h: h + 1e6 - 1e6)
    out = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")(X, Y)
    assert out.losses.isfinite().all()


def test_a_loss_of_nothing_but_rounding_is_no_difference() -> None:
    """A fit that is nearly perfect; its losses are squares of what the batch and the sample are rounded by."""
    torch.manual_seed(0)
    model = nn.Linear(64, 1)
    x = torch.randn(33, 64)
    with torch.no_grad():
        y = torch.stack([model(row[None])[0] for row in x])
    for loss_fn in (F.mse_loss, lambda out, y: (out - y).abs().sum()):
        out = psg_fx.transform(model, loss_fn, quantities=psg_fx.Norms(), backend="eager")(x, y)
        assert out.losses.max() < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_one(value: float) -> None:
    x = X.clone()
    x[-1, 0] = value
    out = psg_fx.transform(Changed(torch.tanh), F.mse_loss, quantities=psg_fx.Norms(), backend="eager")(x, x[:, :3])
    assert not out.losses[-1].isfinite()


def test_a_value_that_is_no_switch() -> None:
    with pytest.raises(psg_fx.BadArgument, match="neither True nor False"):
        psg_fx.transform(Changed(torch.tanh), F.mse_loss, options={"psg_fx.compare_first": 1})


class Windows(nn.Module):
    """Those of a layer's outputs, which share memory, as a write has them."""

    def __init__(self, written: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.written = nn.Parameter(torch.randn(6, 8)), written

    def forward(self, x: Tensor) -> Tensor:
        windows = self.written((x * self.weight).unfold(1, 3, 1), x)
        return (windows.flatten(1).tanh() * torch.arange(96.0).cos()).sum(1)


@pytest.mark.inductor
def test_what_arises_where_the_graph_is_compiled_is_refused_and_said() -> None:
    """Torch's own op writes into the memory that windows share."""
    x, y = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0)), torch.ones(3)
    model = Windows(lambda h, x: h.select_scatter(x[:, :4] * 2, 3, 1))
    assert psg_fx.transform(model, F.mse_loss, quantities=psg_fx.Norms(), backend="eager")(x, y).norms.shape == (3,)
    with pytest.raises(psg_fx.NotYetSupported, match=r"the loss of sample 2(?s:.*)compiled something else"):
        psg_fx.transform(model, F.mse_loss, quantities=psg_fx.Norms())(x, y)


@pytest.mark.inductor
@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_noise_of_a_compiled_fit_that_is_nearly_perfect_is_none(scale: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 1))
    x = torch.randn(33, 64)
    with torch.no_grad():
        y = torch.stack([model(row[None])[0] for row in x])
    step = psg_fx.transform(model, lambda o, t: F.mse_loss(o, t) * scale, quantities=psg_fx.Norms())
    assert step(x, y).losses.max() < 1e-5
