"""What forward and loss leave in the Python around them: what an ordinary forward leaves there, or a refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import psg_fx
from psg_fx import NotYetSupported
from support import oracle
from support.texts import without_numbers

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 3, generator=GENERATOR, dtype=torch.float64), torch.tensor([0, 2, 1, 1])
SEEN: list[Tensor] = []
COUNT = 0


class Model(nn.Module):
    """A linear layer, and `effect(self, h)` on the way, which may return what replaces h."""

    def __init__(self, effect: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.effect = nn.Linear(3, 3).double(), effect
        self.calls, self.log, self.stats = 0, list[Tensor](), dict[str, Any]()
        self.last: Any = None
        self.center = torch.zeros(3, dtype=torch.float64)
        self.config = {"k": 1.0}
        self.numbers = iter(range(100))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        found = self.effect(self, h)
        return h if found is None else found


def step_of(effect: Callable[[Any, Tensor], Any], loss: Any = F.cross_entropy) -> Any:
    return psg_fx.transform(Model(effect), loss, backend="eager")


def state(model: Any) -> dict[str, Any]:
    return {k: v for k, v in model.__dict__.items() if not k.startswith("_") and k not in ("effect", "numbers")}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.allclose(a, b, rtol=1e-13, atol=1e-13)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def keep(model: Any, h: Tensor) -> None:
    model.last = h.detach()


def keep_statistic(model: Any, h: Tensor) -> None:
    model.last = h.detach().mean(0)


def keep_in_dict(model: Any, h: Tensor) -> None:
    model.stats["norm"] = h.detach().norm()


def keep_many(model: Any, h: Tensor) -> None:
    model.last = (h.detach(), {"rows": h.shape[0], "width": h.shape[1]})


def keep_size(model: Any, h: Tensor) -> None:
    model.last = h.shape[0]


def lazy(model: Any, h: Tensor) -> Tensor:
    if model.last is None:
        model.last = torch.arange(3.0, dtype=torch.float64)
    return h * model.last


def centred(model: Any, h: Tensor) -> Tensor:
    model.center = 0.9 * model.center + 0.1 * torch.ones(3, dtype=torch.float64)
    return h - model.center


def flag(model: Any, h: Tensor) -> None:
    model.layer.eval()


def settle(model: Any, h: Tensor) -> Tensor:
    h = h * (1 + model.calls)
    model.calls = h.shape[1]
    return h


def grow_a_table(model: Any, h: Tensor) -> Tensor:
    if h.shape[1] > model.calls:
        model.calls, model.last = h.shape[1], torch.arange(h.shape[1], dtype=h.dtype).cos()
    return h * model.last[: h.shape[1]]


KEPT = [keep, keep_statistic, keep_in_dict, keep_many, keep_size, lazy, centred, flag, settle, grow_a_table]


@pytest.mark.parametrize("effect", KEPT, ids=lambda f: f.__name__)
def test_kept_as_by_an_ordinary_forward(effect: Any) -> None:
    step, ordinary = step_of(effect), Model(effect)
    for rows in (slice(None), slice(3), slice(None)):
        before = state(step.model)
        losses, _ = oracle.loop_grads(fresh(ordinary), F.cross_entropy, X[rows], Y[rows])
        out = step(X[rows], Y[rows])
        ordinary(X[rows])
        assert oracle.relative_error(out.losses, losses) < 1e-12
        assert same(state(step.model), state(ordinary)), (before, state(step.model))
        assert not any(isinstance(v, FakeTensor) for v in state(step.model).values())
    assert len(step.captures) <= 2


def fresh(model: Any) -> Any:
    """A copy in the same state, for a loop that calls it more often."""
    made = Model(model.effect)
    made.load_state_dict(model.state_dict())
    made.__dict__.update(state(model) | {"stats": dict(model.stats)})
    made.forward = functools.partial(_restoring, made, state(made))  # type: ignore[method-assign]
    return made


def _restoring(model: Any, before: dict[str, Any], x: Tensor) -> Tensor:
    found = Model.forward(model, x)
    model.__dict__.update(before)
    return found


def test_what_is_stored_is_read_by_the_loss() -> None:
    model = Model(keep_grad)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + model.last.square().mean()

    losses, grads = oracle.loop_grads(model, loss, X, Y)
    model.last = None
    out = psg_fx.transform(model, loss, backend="eager")(X, Y)
    assert oracle.relative_error(out.losses, losses) < 1e-12
    assert oracle.worst_error(out.grads, grads) < 1e-12


def keep_grad(model: Any, h: Tensor) -> None:
    model.last = h.tanh()


def test_without_a_loss() -> None:
    model, ordinary = Model(keep), Model(keep)
    step = psg_fx.transform(model, backend="eager")
    step(X).sum().backward()
    ordinary(X)
    assert same(state(model), state(ordinary))


def moving_average(model: Any, h: Tensor) -> None:
    """As codebooks have it: autograd sees neither the buffer nor what is written into it."""
    mean = model.mean.data.mul_(0.9)
    mean.add_(h.mean(0), alpha=0.1)
    model.square.data.lerp_(h.square().mean(0), 0.1)


def test_statistics_written_through_data() -> None:
    model, ordinary = Model(moving_average), Model(moving_average)
    for each in (model, ordinary):
        each.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        each.register_buffer("square", torch.ones(3, dtype=torch.float64))
    _, grads = oracle.loop_grads(Model(lambda model, h: None), F.cross_entropy, X, Y)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for _ in range(2):
        assert oracle.worst_error(step(X, Y).grads, grads) < 1e-12
        ordinary(X)
        assert same(dict(model.named_buffers()), dict(ordinary.named_buffers()))


def count(model: Any, h: Tensor) -> Tensor:
    model.calls += 1
    return h * model.calls


def read_a_number(model: Any, h: Tensor) -> None:
    model.last = (h > 0).sum().item()


def append(model: Any, h: Tensor) -> None:
    model.log.append(h.detach())


def to_global_list(model: Any, h: Tensor) -> None:
    SEEN.append(h)


def count_globally(model: Any, h: Tensor) -> None:
    global COUNT
    COUNT += 1


def forget(model: Any, h: Tensor) -> None:
    del model.config


class Counter:
    """Keeps what it counts where no dict is."""

    __slots__ = ("__calls", "array", "tensor")

    def __init__(self) -> None:
        self.__calls, self.array, self.tensor = 0, np.zeros(2), torch.zeros(3)

    def state(self) -> tuple[Any, ...]:
        return self.__calls, self.array.tolist(), self.tensor.tolist()

    def slot(self, model: Any, h: Tensor) -> Tensor:
        self.__calls += 1
        return h * self.__calls

    def in_array(self, model: Any, h: Tensor) -> Tensor:
        self.array[0] += 1
        return h * float(self.array[0])

    def by_numpy(self, model: Any, h: Tensor) -> None:
        np.add(self.array, 1.0, out=self.array)

    def in_tensor(self, model: Any, h: Tensor) -> Tensor:
        self.tensor.add_(1.0)
        return h * self.tensor

    def by_index(self, model: Any, h: Tensor) -> None:
        self.tensor[1] = h.detach().sum()

    def by_out(self, model: Any, h: Tensor) -> None:
        torch.sum(h.detach(), 0, out=self.tensor)

    def by_operator(self, model: Any, h: Tensor) -> None:
        with torch.no_grad():
            self.tensor *= 2.0


NO_BUFFER = "the code writes into a tensor that is no buffer of the model or the loss\n  where  test_effects.py:"
OBJECTS = {
    "slot": "the code changes Counter._Counter__calls", "in_array": "the code changes array\n  where  test_effects.py:",
    "by_numpy": "the code changes array", "in_tensor": NO_BUFFER, "by_index": NO_BUFFER, "by_out": NO_BUFFER,
    "by_operator": NO_BUFFER,
}  # fmt: skip


@pytest.mark.parametrize("way", OBJECTS)
def test_what_an_object_counts_is_refused(way: str) -> None:
    """And it is left as it was."""
    counter = Counter()
    before = counter.state()
    step = step_of(getattr(counter, way))
    with pytest.raises(NotYetSupported, match=OBJECTS[way]):
        step(X, Y)
    assert counter.state() == before


REFUSED: dict[Any, str] = {
    count: "the code changes Model.calls\n  where  test_effects.py:<line>: model.calls += 1\n"
    "  why    it reads the number that it changes, so every call would need another graph\n"
    "  fix    make it a buffer (torch.zeros(()), then add_), which every step writes",
    read_a_number: "the code changes Model.last\n  where  test_effects.py:<line>: model.last = (h > 0).sum().item()\n"
    "  why    a graph runs no Python, so this would happen once, while the model is captured\n"
    "  fix    return the value from the model, keep it in an attribute as a tensor, or leave the line out",
    append: "the code changes log\n  where  test_effects.py:<line>: model.log.append(h.detach())\n"
    "  why    a graph runs no Python, so this would happen once, while the model is captured\n"
    "  fix    return the value from the model, keep it in an attribute as a tensor, or leave the line out",
    to_global_list: "the code changes SEEN\n  where  test_effects.py:<line>: SEEN.append(h)\n"
    "  why    a graph runs no Python, so this would happen once, while the model is captured\n"
    "  fix    return the value from the model, keep it in an attribute as a tensor, or leave the line out",
    count_globally: "the code changes global.COUNT\n  where  test_effects.py:<line>: COUNT += 1\n"
    "  why    it reads the number that it changes, so every call would need another graph\n"
    "  fix    make it a buffer (torch.zeros(()), then add_), which every step writes",
    forget: "the code changes Model.config\n  where  test_effects.py:<line>: del model.config\n"
    "  why    a graph runs no Python, so this would happen once, while the model is captured\n"
    "  fix    return the value from the model, keep it in an attribute as a tensor, or leave the line out",
}


@pytest.mark.parametrize("effect", REFUSED, ids=lambda f: f.__name__)
def test_refused(effect: Any) -> None:
    step = step_of(effect)
    before = state(step.model) | {"log": []}
    with pytest.raises(NotYetSupported) as caught:
        step(X, Y)
    assert without_numbers(str(caught.value)) == REFUSED[effect]
    assert same(state(step.model), before)
    assert (SEEN, COUNT) == ([], 0)


def test_a_recording_hook() -> None:
    model, seen = Model(lambda model, h: None), list[Tensor]()
    handle = model.layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    with pytest.raises(NotYetSupported, match=r"the code changes seen\n  where  test_effects.py:"):
        step(X, Y)
    assert seen == []
    handle.remove()
    step(X, Y)


def test_containers_of_the_model_stay_the_users() -> None:
    step = step_of(lambda model, h: h * model.config["k"])
    config, stats = step.model.config, step.model.stats
    first = step(X, Y).losses
    assert step.model.config is config
    assert step.model.stats is stats
    config["k"] = 2.0
    assert not torch.allclose(step(X, Y).losses, first)


class Keeps(nn.Module):
    """Keeps what it makes of a parameter, and reads it from then on."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.b, self.kept, self.make = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 1)), None, make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.make(self.b)
        return self.layer(x) + self.kept


@pytest.mark.parametrize("make", [lambda b: b.t(), lambda b: b.t().tanh(), lambda b: [b.t() + 1][0]])
def test_what_was_made_of_parameters_is_not_read_as_a_constant(make: Any) -> None:
    model, x = Keeps(make), torch.randn(3, 4)
    step = psg_fx.transform(model, lambda out: out.sin().sum(1), backend="eager", progress=False)
    first = step(x)
    assert model.kept is not None
    assert not model.kept.requires_grad
    with pytest.raises(NotYetSupported, match=r"Keeps\.kept, which an earlier call has computed of parameters"):
        step(x)
    model.kept = None
    torch.testing.assert_close(step(x).grads["b"], first.grads["b"])


def test_what_was_detached_or_is_frozen_is_a_constant() -> None:
    for make, frozen in ((lambda b: b.t().detach(), False), (lambda b: b.t() + 1, True)):
        model, x = Keeps(make), torch.randn(3, 4)
        model.b.requires_grad_(not frozen)
        step = psg_fx.transform(model, lambda out: out.sin().sum(1), backend="eager", progress=False)
        torch.testing.assert_close(step(x).grads["layer.weight"], step(x).grads["layer.weight"])


class SizesOfTwo(nn.Module):
    """Keeps the sizes of two inputs, one of which it computes nothing with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(X.shape[1], 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        self.sizes = [x.shape[0], 2 * other.shape[0]]
        return self.layer(x).view(x.shape[0], 3)


def test_sizes_of_an_input_that_is_not_read() -> None:
    model = SizesOfTwo().double()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (4, 6, 1):
        step((X[:size], torch.zeros(len(X[:size]))), Y[:size])
        assert model.sizes == [len(X[:size]), 2 * len(X[:size])]


class SizesOfRows(SizesOfTwo):
    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        self.sizes = [x.shape[0], offsets.shape[0]]
        samples = torch.bucketize(torch.arange(x.shape[0]), offsets, right=True) - 1
        return x.new_zeros(offsets.shape[0] - 1, 3).index_add(0, samples, self.layer(x))


def test_numbers_of_rows() -> None:
    model = SizesOfRows()
    rows = ((psg_fx.Rows.from_offsets(1), None), 0)
    step = psg_fx.transform(model, lambda o: o.square().sum(1), backend="eager", batch_dim=rows)
    for offsets in ([0, 3, 5, 7], [0, 1, 9]):
        step((torch.randn(offsets[-1], X.shape[1]), torch.tensor(offsets)))
        assert model.sizes == [offsets[-1], len(offsets)]
