"""Copies of a step: deepcopy, pickle, torch.save, before and after a capture, and inside other modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle
from support.selection import one_in
from support.small import same_mlp as model

X, Y = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2])


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "save": saved,
}


@pytest.mark.parametrize(
    ("way", "captured"),
    one_in(3, [(way, captured) for way in WAYS for captured in (True, False)], always={"pickle-True"}),
)
def test_a_copy_is_a_step_over_the_copied_model(way: str, captured: bool) -> None:
    quantities = [psg_fx.Grads(), psg_fx.ClippedSum(max_norm=0.1)]
    step = psg_fx.transform(model(), F.cross_entropy, quantities=quantities, backend="eager", params="2.*")
    if captured:
        step(X, Y)
    made = WAYS[way](step)
    assert type(made) is type(step)
    assert vars(made).keys() == vars(step).keys()
    assert made.settings == step.settings
    assert not made.captures
    assert made.model is not step.model
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in step.named_parameters()]
    with torch.no_grad():
        step.model[2].weight.zero_()
    losses, grads = oracle.loop_grads(model(), F.cross_entropy, X, Y)
    out = made(X, Y)
    torch.testing.assert_close(out.losses, losses)
    torch.testing.assert_close(out.grads, {n: g for n, g in grads.items() if n.startswith("2.")})
    assert (step(X, Y).losses - losses).abs().max() > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_without_a_loss(way: str) -> None:
    step = psg_fx.transform(model(), loss_reduction="mean", backend="eager").eval()
    F.cross_entropy(step(X), Y).backward()
    step.zero_grad()
    made = WAYS[way](step)
    assert not made.training
    F.cross_entropy(made(X), Y).backward()
    _, want = oracle.loop_grads(model(), F.cross_entropy, X, Y)
    for name, parameter in made.model.named_parameters():
        torch.testing.assert_close(parameter.grad_sample, want[name])
    assert all(getattr(p, "grad_sample", None) is None for p in step.parameters())


class Weighted(nn.Module):
    """A loss that refers to the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = [model]

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + self.held[0][0].weight.square().sum()


@pytest.mark.parametrize("way", WAYS)
def test_what_the_loss_shares_with_the_model_stays_shared(way: str) -> None:
    shared = model()
    made = WAYS[way](psg_fx.transform(shared, Weighted(shared), backend="eager"))
    assert made.loss_fn.held[0] is made.model
    _, want = oracle.loop_grads(shared, Weighted(shared), X, Y)
    torch.testing.assert_close(made(X, Y).grads, want)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_holds_a_step(way: str) -> None:
    holder = nn.ModuleDict({"step": psg_fx.transform(model(), backend="eager"), "other": nn.Linear(2, 2)})
    holder["step"](X)
    made = WAYS[way](holder)
    made["step"](X).sum().backward()
    assert made["step"].model[0].weight.grad_sample.shape == (3, 5, 4)


def doubled(module: Any, args: Any, output: Any) -> Any:
    return 2 * output


def test_hooks_of_the_step_are_copied() -> None:
    step = psg_fx.transform(model(), backend="eager")
    step.register_forward_hook(doubled)
    torch.testing.assert_close(copy.deepcopy(step)(X), 2 * model()(X))


def test_a_shallow_copy_shares_the_model() -> None:
    step = psg_fx.transform(model(), F.cross_entropy, backend="eager")
    step(X, Y)
    made = copy.copy(step)
    assert made.model is step.model
    torch.testing.assert_close(made(X, Y).losses, step(X, Y).losses)


def test_a_loss_that_python_cannot_pickle_is_named() -> None:
    step = psg_fx.transform(model(), lambda out, y: F.cross_entropy(out, y), backend="eager")
    with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
        pickle.dumps(step)
    assert copy.deepcopy(step)(X, Y).losses.shape == (3,)


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
def test_opacus_around_a_step_can_be_copied() -> None:
    opacus = pytest.importorskip("opacus")
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=2)
    wrapped, _, _ = opacus.PrivacyEngine().make_private(
        module=psg_fx.transform(plain, loss_reduction="mean", backend="eager"), optimizer=optimizer,
        data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="no_op",
    )  # fmt: skip
    made = copy.deepcopy(wrapped)
    F.cross_entropy(made(X), Y).backward()
    _, want = oracle.loop_grads(model(), F.cross_entropy, X, Y)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad_sample, want[name.removeprefix("_module.")])
    assert all(getattr(p, "grad_sample", None) is None for p in plain.parameters())


@pytest.mark.parametrize("loss_fn", [None, F.cross_entropy])
def test_a_step_and_its_model_are_in_one_mode(loss_fn: Any) -> None:
    """Lightning keeps the flag of each module, and a step stands for its model among them."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    step = psg_fx.transform(model, loss_fn, backend="eager")
    kept = {module: module.training for module in step.modules()}
    step.eval()
    assert not model.training
    for module, mode in kept.items():
        module.training = mode
    assert model.training
    model.eval()
    assert not step.training


def test_what_is_applied_to_a_step_is_applied_to_its_model() -> None:
    step = psg_fx.transform(nn.Linear(4, 3))
    seen: list[nn.Module] = []
    assert step.apply(seen.append) is step
    assert seen == [step.model]


class Holding(nn.Module):
    """A model that holds a step of itself, in a list: no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.steps = [psg_fx.transform(self, F.cross_entropy, backend="eager")]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_model_has_a_step_of_its_own(way: str) -> None:
    """Which is called before anybody has asked for its parameters."""
    made = WAYS[way](Holding())
    found = made.steps[0](X, Y).grads
    torch.testing.assert_close(found, oracle.loop_grads(made, F.cross_entropy, X, Y)[1])


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_holds_a_step_of_itself(way: str) -> None:
    """The step of the copy is made before the model that it is of."""
    made = WAYS[way](Holding())
    (step,) = made.steps
    assert step.model is made
    assert dict(step.named_parameters()).keys() == dict(made.named_parameters()).keys()
    assert step.net is made.net
    torch.testing.assert_close(step(X, Y).grads, oracle.loop_grads(made, F.cross_entropy, X, Y)[1])
