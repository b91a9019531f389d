"""The compiled backend gives what the eager one gives; a few models, since each takes seconds to compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.graph import GraphLowering

import psg_fx
from psg_fx import ClippedSum, Grads, Norms, WeightedSum, zoo
from psg_fx.errors import BadArgument, NotYetSupported
from support import oracle
from support.selection import one_in

pytestmark = [pytest.mark.inductor, pytest.mark.usefixtures("fresh_compiler")]

SIZES: dict[str, dict[str, Any]] = {
    "simplecnn": {"batch": 4, "image": 10, "width": 4, "hidden": 8, "classes": 5},
    "gpt": {"batch": 3, "layers": 1, "width": 8, "heads": 2, "tokens": 6, "vocabulary": 11, "tied": True},
    "lstm": {"batch": 3, "tokens": 3, "vocabulary": 11, "width": 4, "hidden": 4, "layers": 1},
}


def outputs(ex: zoo.Example, backend: str, quantities: list[Any], count: int) -> Any:
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=quantities, batch_dim=ex.batch_dim, backend=backend)
    return step, step(ex.inputs[:count], ex.targets[:count])


def compare(got: Any, want: Any) -> None:
    assert set(vars(got)) == set(vars(want))
    for field, value in vars(want).items():
        if isinstance(value, dict):
            assert oracle.worst_error(getattr(got, field), value) < 1e-5, field
        else:
            assert oracle.relative_error(getattr(got, field), value) < 1e-5, field


@pytest.mark.rest  # what they are made of is compiled by test_backends.py and the tests of layers
@pytest.mark.parametrize("name", SIZES)
def test_inductor_equals_eager(name: str) -> None:
    ex = zoo.example(name, **SIZES[name])
    asked = [Norms(), ClippedSum(0.1)]
    _, want = outputs(ex, "eager", asked, len(ex.inputs))
    _, got = outputs(ex, "inductor", asked, len(ex.inputs))
    compare(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rest)])
def test_two_batch_sizes_of_one_capture(backend: str) -> None:
    torch.manual_seed(0)
    model, asked = nn.Linear(4, 3), [Grads(), ClippedSum(0.5)]
    steps = {
        name: psg_fx.transform(model, lambda out: out.square().sum(), quantities=asked, backend=name)
        for name in (backend, "eager")
    }
    for size in (4, 7, 4, 1):
        x = torch.randn(size, 4)
        compare(steps[backend](x), steps["eager"](x))
    assert len(steps[backend].captures) == 1


def test_a_failure_of_inductors_own_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("a loop is not a loop")

    monkeypatch.setattr(GraphLowering, "run", fails)
    step = psg_fx.transform(nn.Linear(4, 3), lambda out: out.square().sum(), backend="inductor")
    with pytest.raises(NotYetSupported, match="inductor fails to compile this step") as caught:
        step(torch.randn(5, 4))
    assert "a loop is not a loop" in caught.value.why
    assert 'backend="eager"' in caught.value.fix


def test_a_missing_compiler_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(GraphLowering, "run", fails)
    step = psg_fx.transform(nn.Linear(4, 3), lambda out: out.square().sum(), backend="inductor")
    with pytest.raises(NotYetSupported, match="No working C\\+\\+ compiler found") as caught:
        step(torch.randn(5, 4))
    assert "CXX" in caught.value.fix


SIZES_DRAWN = [5, 1, 3, 0, 4, 4, 1, 6, 2, 3, 0, 1, 7, 5]
"""Like Poisson sampling with a mean of 3; 5, 4 and 3 are also sizes of the model below."""


def captures() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


STARTS = [(dynamic, allowed, first) for first in (0, 1, 4, 5) for dynamic, allowed in ((True, 1), (None, 2))]


@pytest.mark.parametrize(("dynamic", "allowed", "first"), one_in(5, STARTS))
def test_one_compilation_serves_all_batch_sizes(dynamic: bool | None, allowed: int, first: int) -> None:
    """One graph from 2 samples on (None: and one of the first size alone), one for 1 sample, none for 0."""
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    step = psg_fx.transform(
        model, F.cross_entropy, quantities=[Grads(), WeightedSum()], dynamic=dynamic, backend="aot_eager"
    )
    want = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), WeightedSum()], backend="eager")
    counts = []
    for size in [first, *SIZES_DRAWN]:
        batch = torch.randn(size, 4), torch.randint(3, (size,))
        compare(step(*batch, weights=torch.rand(size).fill_(0.5)), want(*batch, weights=torch.full((size,), 0.5)))
        counts.append(captures())
    assert len(step.captures) == 1
    assert counts[-1] <= allowed + 1
    assert counts[5:] == counts[5:6] * len(counts[5:])


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, ["simplecnn", "gpt"]))
def test_one_compilation_serves_all_batch_sizes_without_a_loss(name: str) -> None:
    """A forward and a backward from 2 samples on, and for 1."""
    torch._dynamo.utils.counters.clear()
    ex = zoo.example(name, **SIZES[name] | {"batch": 7})
    step = psg_fx.transform(ex.model, dynamic=True, backend="aot_eager")
    counts = []
    for size in (6, 1, 7, 2, 1, 3):
        step(ex.inputs[:size]).square().sum().backward()
        for parameter in ex.model.parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        counts.append(captures())
    assert counts == [2, 4, 4, 4, 4, 4]


@pytest.mark.slow
def test_inductor_compiles_a_convolution_once_for_all_batch_sizes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Tanh(), nn.AvgPool2d(30), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(9, 16, 32, 32), torch.randint(3, (9,))
    step = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), ClippedSum(0.1)], dynamic=True)
    want = psg_fx.transform(model, F.cross_entropy, quantities=[Grads(), ClippedSum(0.1)], backend="eager")
    for size in (6, 2, 9, 4):
        compare(step(x[:size], y[:size]), want(x[:size], y[:size]))
    assert step.captures[0].compiled == 1
    assert "grouped-conv" in step.explain()


@pytest.mark.slow
@pytest.mark.parametrize("mode", one_in(2, ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]))
def test_modes(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x, y = torch.randn(4, 4), torch.randint(3, (4,))
    step = psg_fx.transform(model, F.cross_entropy, mode=mode, options={"epilogue_fusion": False})
    want = psg_fx.transform(model, F.cross_entropy, backend="eager")(x, y)
    first = step(x, y)
    step(x.flip(0), y)
    compare(first, want)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(BadArgument, match="mode='fast' is unknown"):
        psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, mode="fast")
