"""Calls that do not wait for the compiler: the graph is run as it is until its code is there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import preserve_rng_state

import psg_fx
from psg_fx import ClippedSum, Grads
from support import oracle

X, Y = torch.randn(6, 4), torch.randint(3, (6,))


def made(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    return model, psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), ClippedSum(0.1)], **options)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Compilation waits until this is set."""
    from psg_fx.passes.compile import sizes

    go, original = threading.Event(), sizes.compiled

    def waiting(*args: Any) -> Any:
        assert go.wait(60)
        return original(*args)

    monkeypatch.setattr(sizes, "compiled", waiting)
    return go


def test_calls_are_answered_before_and_after(held: threading.Event) -> None:
    _, want = made(backend="eager")
    _, step = made(warm="eager")
    sizes = [6, 6, 3]
    before = [step(X[:n], Y[:n]) for n in sizes]
    assert step.captures[0].compiled == 0
    held.set()
    step.wait()
    assert step.captures[0].compiled == 1
    after = [step(X[:n], Y[:n]) for n in sizes]
    step.wait()
    assert step.captures[0].compiled == 2  # the second size made a symbol of it
    for n, *outs in zip(sizes, before, after, strict=True):
        for out in outs:
            assert oracle.worst_error(out.grads, want(X[:n], Y[:n]).grads) < 1e-5
            assert oracle.worst_error(out.clipped_sum, want(X[:n], Y[:n]).clipped_sum) < 1e-5


def test_what_is_drawn_meanwhile_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets the generator back when it has compiled."""
    from psg_fx.passes.compile import sizes

    began, go, original = threading.Event(), threading.Event(), sizes.compiled

    def compiled(*args: Any) -> Any:
        with preserve_rng_state():
            began.set()
            assert go.wait(60)
            return original(*args)

    monkeypatch.setattr(sizes, "compiled", compiled)
    _, step = made(warm="eager")
    step(X, Y)
    assert began.wait(60)
    torch.manual_seed(1)
    drawn = [torch.rand(3) for _ in range(2)]
    go.set()
    step.wait()
    drawn.append(torch.rand(3))
    torch.manual_seed(1)
    assert torch.equal(torch.stack(drawn), torch.stack([torch.rand(3) for _ in range(3)]))


def test_parameters_are_those_of_the_call(held: threading.Event) -> None:
    model, step = made(warm="eager")
    step(X, Y)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    held.set()
    step.wait()
    _, want = made(backend="eager")
    want.load_state_dict(model.state_dict())
    assert oracle.worst_error(step(X, Y).grads, want(X, Y).grads) < 1e-5


def test_without_a_loss(held: threading.Event) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    step = psg_fx.transform(model, warm="eager")
    found = []
    for _ in range(2):
        F.cross_entropy(step(X), Y, reduction="sum").backward()
        found.append({n: p.grad_sample for n, p in model.named_parameters()})
        step.zero_grad()
        held.set()
        step.wait()
    assert oracle.worst_error(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("how", ["warm", "stance"])
def test_results_are_the_callers_whichever_code_has_run_first(how: str) -> None:
    """The gradient of w · x is x itself, of which the graph makes a copy and compiled code does not."""
    options: Any = {"warm": "eager"} if how == "warm" else {"backend": "inductor"}
    step = psg_fx.transform(nn.Linear(4, 1, bias=False), lambda out: out.sum(), **options)
    with torch.compiler.set_stance("force_eager" if how == "stance" else "default"):
        step(X)
    step.wait()
    x = X.clone()
    step(x).grads["weight"].zero_()
    assert torch.equal(x, X)


def test_an_error_of_the_compiler_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from psg_fx.passes.compile import sizes

    def failing(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(sizes, "compiled", failing)
    _, step = made(warm="eager")
    step(X, Y)
    step.wait()
    with pytest.raises(RuntimeError, match="no compiler"):
        step(X, Y)


def test_what_it_may_be() -> None:
    with pytest.raises(psg_fx.BadArgument, match="warm"):
        made(warm="inductor")
    with pytest.raises(psg_fx.BadArgument, match="no effect"):
        made(warm="eager", backend="eager")
