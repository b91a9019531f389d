"""A step reads the model's state at every call, and changes nothing that an ordinary forward would not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Grads
from support import oracle
from support.small import same_mlp as mlp

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 1])


def compare(step: Any, model: nn.Module, x: Tensor = X, y: Tensor = Y, tolerance: float = 1e-10) -> Any:
    losses, grads = oracle.loop_grads(model, F.cross_entropy, x, y)  # first: the step may update buffers
    out = step(x, y)
    assert oracle.relative_error(out.losses, losses) < tolerance
    assert oracle.worst_error(out.grads, grads) < tolerance
    return out


def step_of(model: nn.Module, **options: Any) -> Any:
    return psg_fx.transform(model, F.cross_entropy, backend="eager", **options)


def test_optimizer_steps_are_seen() -> None:
    model = mlp()
    step = step_of(model)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        out = compare(step, model)
        for name, p in model.named_parameters():
            p.grad = out.grads[name].mean(0)
        optimizer.step()
    assert len(step.captures) == 1


def test_load_state_dict_is_seen() -> None:
    model, other = mlp(), mlp()
    step = step_of(model)
    step(X, Y)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-2.0)
    step.load_state_dict(other.state_dict())
    compare(step, model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Own(nn.Module):
    """Loads in ways of its own: a buffer that is not saved, extra state, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra, self.seen = nn.Linear(4, 3).double(), 0, list[str]()
        self.register_buffer("fixed", torch.ones(3), persistent=False)
        self.register_load_state_dict_pre_hook(lambda model, *_: model.seen.append("before"))
        self.register_load_state_dict_post_hook(lambda model, _: model.seen.append("after"))

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


@pytest.mark.parametrize("around", [lambda step: step, nn.Sequential])
def test_a_state_dict_is_loaded_as_the_model_does(around: Any) -> None:
    """By the step itself and by a module around it, as Opacus' is."""
    model, other = Own(), Own()
    other.extra = 7
    around(step_of(model)).load_state_dict(around(step_of(other)).state_dict())
    assert torch.equal(model.layer.weight, other.layer.weight)
    assert (model.extra, model.seen) == (7, ["before", "after"])


def test_replaced_parameter_is_seen() -> None:
    model = mlp()
    step = step_of(model)
    step(X, Y)
    model[0].weight = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
    compare(step, model)


def test_replaced_module_is_seen() -> None:
    model = mlp()
    step = step_of(model)
    step(X, Y)
    model[1] = nn.Sigmoid()
    compare(step, model)


def test_to_another_dtype() -> None:
    model = mlp().float()
    step = step_of(model)
    compare(step, model, X.float(), tolerance=2e-5)
    model.double()
    assert compare(step, model).grads["0.weight"].dtype == torch.float64


def test_requires_grad_is_seen() -> None:
    model = mlp()
    step = step_of(model)
    assert list(step(X, Y).grads) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    model[0].requires_grad_(False)
    assert list(compare(step, model).grads) == ["2.weight", "2.bias"]
    model[0].requires_grad_(True)
    assert list(compare(step, model).grads) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_train_and_eval_are_seen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    step = step_of(model).eval()
    assert not model.training
    compare(step, model)
    step.train()
    assert model[1].training
    first, second = step(X, Y).losses, step(X, Y).losses
    assert not torch.equal(first, second)
    model.eval()
    compare(step, model)


def test_state_is_the_models_own() -> None:
    model = mlp()
    step = step_of(model)
    assert [n for n, _ in step.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(step.parameters(), model.parameters(), strict=True))
    assert list(step.state_dict()) == list(model.state_dict())


def test_nothing_else_changes() -> None:
    model = mlp()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    flags = [m.training for m in model.modules()]
    out = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), ClippedSum(0.1)], backend="eager")(X, Y)
    assert not out.grads["0.weight"].requires_grad
    assert not out.losses.requires_grad
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is not None
        assert bool((p.grad == 7.0).all())
        assert not hasattr(p, "grad_sample")
    assert flags == [m.training for m in model.modules()]


class Counting(nn.Module):
    """Counts its forward calls and keeps a running number that reads no samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("decay", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.decay.mul_(0.5)
        return self.layer(x) * self.decay


def test_buffers_are_updated_as_one_forward_does() -> None:
    model, ordinary = Counting(), Counting()
    step = step_of(model)
    for _ in range(3):
        compare(step, model)
        ordinary(X)
        assert torch.equal(model.calls, ordinary.calls)
        assert torch.equal(model.decay, ordinary.decay)
    step(X[:2], Y[:2])
    assert model.calls == 4


class Averaging(nn.Module):
    """Subtracts a running mean that it keeps: written in place, assigned to a buffer, or to an attribute."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.way = nn.Linear(4, 3).double(), way
        mean = torch.zeros(3, dtype=torch.float64)
        if way == "attribute":
            self.mean = mean
        else:
            self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        out = h - self.mean
        now = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        if self.way == "in place":
            self.mean.copy_(now)
        else:
            self.mean = now
        return out


@pytest.mark.parametrize("way", ["in place", "assigned", "attribute"])
def test_a_state_that_is_read_and_written(way: str) -> None:
    """Every step leaves what the forward leaves; a validation starts from what the step has read, and leaves all."""
    model, ordinary = (nn.Sequential(nn.Tanh(), Averaging(way)) for _ in range(2))
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for _ in range(3):
        before = model[1].mean
        torch.testing.assert_close(before, ordinary[1].mean, rtol=1e-12, atol=1e-15)
        kept = before.clone()
        report = step.validate(X, Y)
        assert report.ok, report
        assert model[1].mean is before
        assert torch.equal(before, kept)
        step(X, Y)
        ordinary(X)
        assert (model[1].mean is before) == (way == "in place")
    assert len(step.captures) == 1
    small = psg_fx.transform(model, F.cross_entropy, backend="eager", memory_budget=600)
    with pytest.raises(psg_fx.errors.BadArgument, match=r"mean keeps a statistic of the whole batch"):
        small(X, Y)


def test_a_failed_call_leaves_everything() -> None:
    model = Counting()
    step = step_of(model)
    step(X, Y)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    for bad in ((X, Y[:2]), (X[:, :2], Y), (X.float(), Y)):
        with pytest.raises(Exception):  # noqa: B017, PT011  (whatever it is, the state must stay)
            step(*bad)
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
    compare(step, model)


def test_a_refused_first_call_leaves_everything() -> None:
    class Mixing(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - x.mean()

    model = Mixing()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(psg_fx.SamplesMixed):
        step_of(model)(X, Y)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_dropout_draws_differ_between_samples_and_calls() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False)).double()
    x = torch.ones(4, 64, dtype=torch.float64)
    step = psg_fx.transform(model, lambda out: out.sum(), backend="eager")
    torch.manual_seed(3)
    first, second = step(x).grads["1.weight"], step(x).grads["1.weight"]
    torch.manual_seed(3)
    again = step(x).grads["1.weight"]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert len({tuple(row.flatten().tolist()) for row in first}) == 4
    assert set(first.flatten().tolist()) == {0.0, 2.0}


def test_a_bound_may_change_between_calls() -> None:
    model = mlp()
    bound = torch.tensor(1e9, dtype=torch.float64)
    step = psg_fx.transform(model, F.cross_entropy, quantities=ClippedSum(bound), backend="eager")
    _, grads = oracle.loop_grads(model, F.cross_entropy, X, Y)
    for value in (1e9, 0.1, 0.0):
        bound.fill_(value)
        assert oracle.worst_error(step(X, Y).clipped_sum, oracle.clipped_sum(grads, value)) < 1e-10
    assert len(step.captures) == 1


class Noisy(nn.Module):
    """A loss with a state of its own: a scale, doubled in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * self.scale * (2 if self.training else 1)


def test_the_state_of_a_loss_module_is_read_too() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3).double(), Noisy()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    step = psg_fx.transform(model, loss, backend="eager")
    doubled = step(x, y).losses
    loss.eval()
    plain = step(x, y).losses
    loss.scale.fill_(3.0)
    torch.testing.assert_close(doubled, 2 * plain)
    torch.testing.assert_close(step(x, y).losses, 3 * plain)


def test_a_loss_module_may_be_made_at_every_call() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=output.dtype))(output, target)
        return found

    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    step = psg_fx.transform(model, loss, backend="eager")
    step(x, y)
    assert oracle.worst_error(step(x, y).grads, oracle.loop_grads(model, loss, x, y)[1]) < 1e-12
    assert len(step.captures) == 1


def test_attributes_of_modules_are_read_too() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.1), nn.Linear(5, 3)).double()
    step = step_of(model)
    compare(step, model)
    model[1].negative_slope = 0.7
    compare(step, model)
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.warns(UserWarning, match="captured for the third time .* because the hooks of a Linear has changed"):
        compare(step, model)
    handle.remove()
    compare(step, model)
    known = len(step.captures)
    model.unread = 5
    compare(step, model)
    assert len(step.captures) == known


def test_what_a_loss_closes_over_is_read_too() -> None:
    model, scale = mlp(), [1.0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / scale[0], target)

    step = psg_fx.transform(model, loss, backend="eager")
    for value in (1.0, 4.0):
        scale[0] = value
        losses, grads = oracle.loop_grads(model, loss, X, Y)
        out = step(X, Y)
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert oracle.worst_error(out.grads, grads) < 1e-12


class Scaled(nn.Module):
    """`function(scale)` times a linear layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3).double(), function

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        return self.layer(x) * self.function(scale)


def test_arguments_that_look_alike_are_told_apart() -> None:
    first, second = np.ones(5000), np.ones(5000)
    second[2500] = 3.0
    picks = psg_fx.transform(Scaled(lambda a: float(a[2500])), lambda out: out.sum(), backend="eager")
    torch.testing.assert_close(picks((X, second)).losses, 3.0 * picks((X, first)).losses)
    kind = psg_fx.transform(Scaled(lambda a: 2.0 if a is True else 1.0), lambda out: out.sum(), backend="eager")
    torch.testing.assert_close(kind((X, True)).losses, 2.0 * kind((X, 1)).losses)
