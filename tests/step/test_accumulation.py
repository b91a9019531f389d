"""`grad_sample` from call to call of a step without a loss: replaced after an optimizer's step, collected, refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import BadArgument
from support import oracle
from support.training import quietly

STILL = (
    "0.weight still has a grad_sample\n"
    "  where  step(*args, **kwargs)\n"
    "  why    a second backward would overwrite the per-sample gradients of another batch\n"
    "  fix    step.zero_grad() clears grad_sample and grad, where optimizer.zero_grad() knows grad only; "
    "transform(..., accumulate=True) makes it a list, with an entry for each call; torch.no_grad() if no gradients are "
    "wanted"
)


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))


def backward(step: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(step(x), y, reduction="sum").backward()


def agrees(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    _, want = oracle.loop_grads(model, F.cross_entropy, x, y)
    return all(torch.allclose(p.grad_sample, want[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_training_with_an_optimizer_of_torch(kind: Any, accumulate: bool) -> None:
    """A grad_sample of parameters that have changed since is replaced."""
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager", accumulate=accumulate)
    optimizer = kind(model.parameters(), lr=0.1)
    for part in (slice(0, 4), slice(4, 6), slice(1, 5)):
        optimizer.zero_grad()
        backward(step, x[part], y[part])
        assert agrees(model, x[part], y[part])
        for p in model.parameters():
            p.grad = p.grad_sample.mean(0)
        optimizer.step()


def test_what_is_replaced_is_given_back_before_the_forward() -> None:
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager")
    backward(step, x, y)
    with torch.no_grad():
        model[0].bias.add_(1.0)
        step(x)
        assert model[0].weight.grad_sample is not None
    step(x)
    assert all(p.grad_sample is None for p in model.parameters())


def test_zero_grad_of_the_step_clears_both() -> None:
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager")
    backward(step, x, y)
    for p in model.parameters():
        p.grad = p.grad_sample.sum(0)
    step.zero_grad()
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())
    backward(step, x[:2], y[:2])
    assert agrees(model, x[:2], y[:2])
    step.zero_grad(set_to_none=False)
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())


def test_zero_grad_of_an_optimizer_alone_is_refused_with_the_way_out() -> None:
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager")
    backward(step, x, y)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    with pytest.raises(BadArgument) as caught:
        step(x)
    assert str(caught.value) == STILL
    assert agrees(model, x, y)


def test_accumulation_makes_a_list_with_an_entry_for_each_call() -> None:
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager", accumulate=True)
    _, want = oracle.loop_grads(model, F.cross_entropy, x, y)
    for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
        backward(step, x[part], y[part])
    for name, p in model.named_parameters():
        assert [len(entry) for entry in p.grad_sample] == [3, 2, 1]
        torch.testing.assert_close(torch.cat(p.grad_sample), want[name])
    step.zero_grad()
    backward(step, x[:2], y[:2])
    assert agrees(model, x[:2], y[:2])


def fused(model: nn.Module) -> None:
    """Its kernel writes without a new version."""
    for p in model.parameters():
        p.grad = p.grad_sample.mean(0)
    torch.optim.SGD(model.parameters(), 0.1, fused=True).step()


def other_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad_sample.mean(0)


def from_a_vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("update", [fused, other_memory, from_a_vector], ids=lambda f: f.__name__)
def test_parameters_that_change_without_a_version(update: Callable[[nn.Module], None], accumulate: bool) -> None:
    """What was left belongs to other values: it is replaced, and no list of gradients at two places."""
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager", accumulate=accumulate)
    backward(step, x, y)
    update(model)
    backward(step, x[:3], y[:3])
    assert agrees(model, x[:3], y[:3])


@pytest.mark.parametrize("accumulate", [False, True])
def test_two_calls_in_one_loss_are_refused(accumulate: bool) -> None:
    """Their rows are the same samples, so neither a list nor the last of them is the gradient of a sample."""
    model, x, _ = small()
    product = (step := psg_fx.transform(model, backend="eager", accumulate=accumulate))(x) * step(2 * x)
    with pytest.raises(BadArgument, match="call the step once for each backward, and backward before the next call"):
        product.sum().backward()


def test_a_second_backward_of_one_call_is_refused() -> None:
    model, x, _ = small()
    out = psg_fx.transform(model, backend="eager", accumulate=True)(x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(BadArgument, match="still has a grad_sample"):
        out.sum().backward()
    assert model[0].weight.grad_sample.shape == (6, 5, 4)


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_others_left_is_neither_replaced_nor_added_to(accumulate: bool) -> None:
    model, x, _ = small()
    step = psg_fx.transform(model, backend="eager", accumulate=accumulate)
    model[2].bias.grad_sample = torch.zeros(6, 3)
    with torch.no_grad():
        model[2].bias.add_(1.0)
    with pytest.raises(BadArgument, match=r"2\.bias still has a grad_sample"):
        step(x)


def test_a_step_of_a_part_of_the_model() -> None:
    """Its parameters are known by other names."""
    model, x, y = small()
    backward(psg_fx.transform(model, backend="eager"), x, y)
    part = psg_fx.transform(model[:1], backend="eager")
    with pytest.raises(BadArgument, match="still has a grad_sample"):
        part(x)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    part(x).sum().backward()
    assert model[0].weight.grad_sample.shape == (6, 5, 4)


def test_what_is_frozen_between_two_calls_keeps_nothing_of_the_first() -> None:
    model, x, y = small()
    step = psg_fx.transform(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        backward(step, x, y)
        assert (model[0].weight.grad_sample is None) is frozen
        for p in model.parameters():
            p.grad = None if p.grad_sample is None else p.grad_sample.sum(0)
        optimizer.step()


def test_what_is_saved_is_a_plain_tensor() -> None:
    """torch.load takes no classes of others."""
    model, x, y = small()
    backward(psg_fx.transform(model, backend="eager"), x, y)
    file = io.BytesIO()
    torch.save([*model.parameters(), *(p.grad_sample for p in model.parameters())], file)
    file.seek(0)
    assert [tuple(found.shape) for found in torch.load(file)[-2:]] == [(6, 3, 5), (6, 3)]


def dp_step(mode: str, parts: list[slice]) -> list[Tensor]:
    """One step of Opacus' optimizer on several parts, whose gradients it finds in lists."""
    opacus = pytest.importorskip("opacus")
    model, x, y = small()
    wrapped: Any = opacus.GradSampleModule(model, loss_reduction="mean") if mode == "hooks" else psg_fx.transform(
        model, loss_reduction="mean", backend="eager", accumulate=True
    )  # fmt: skip
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=3
    )
    for _ in range(2):
        optimizer.zero_grad()
        for part in parts:
            F.cross_entropy(wrapped(x[part]), y[part]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@quietly
def test_opacus_finds_what_its_own_hooks_leave() -> None:
    parts = [slice(0, 3), slice(3, 6)]
    torch.testing.assert_close(dp_step("step", parts), dp_step("hooks", parts))
    assert not torch.allclose(dp_step("step", parts)[0], dp_step("step", parts[:1])[0])
