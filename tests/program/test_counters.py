"""Numbers that the code counts on with: every step counts as a forward pass does, or the code is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported

X = torch.randn(5, 4)


class Counts(nn.Module):
    """A linear layer, and `count(self, x)` before it, which may return a factor."""

    def __init__(self, count: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 3), count
        self.calls, self.seen, self.decay = 0, 3, 1.0
        self.other, self.size, self.table = 0, 0, nn.Buffer(torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.count(self, x)
        return self.layer(x) if factor is None else self.layer(x) * factor

    def numbers(self) -> tuple[Any, ...]:
        return self.calls, self.seen, self.decay, self.other


def calls(model: Any, x: Tensor) -> None:
    model.calls += 1


def samples(model: Any, x: Tensor) -> None:
    model.seen += x.shape[0]
    model.seen += 2 * x.size(0) - 1


def several(model: Any, x: Tensor) -> None:
    model.decay = 0.3 * model.decay - 0.1
    model.decay = 1 - model.decay / 3
    model.calls = (2**model.calls + 7) % 5 // 2


def down_to(model: Any, x: Tensor) -> None:
    model.calls = 100 - model.calls
    if isinstance(model.calls, int) and x.shape[1] == 4:
        model.seen -= True


def set_anew(model: Any, x: Tensor) -> None:
    model.calls += 1
    model.other = 0
    model.other += 2


def beside_what_is_set_up(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    if model.size < x.shape[1]:
        model.size = x.shape[1]
        model.table = torch.arange(float(model.size))
    return 1 + model.table[:1]


@pytest.mark.parametrize("count", [calls, samples, several, down_to, set_anew, beside_what_is_set_up])
def test_steps_count_as_forward_passes_do(count: Callable[[Any, Tensor], Any]) -> None:
    model = nn.Sequential(Counts(count), nn.Linear(3, 4), Counts(count))
    ordinary = copy.deepcopy(model)
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    for size in (5, 3, 1, 3, 5):
        losses = step(X[:size]).losses
        torch.testing.assert_close(losses.sum(), ordinary(X[:size]).sum())
        for own, its in zip(model, ordinary, strict=True):
            if isinstance(own, Counts):
                assert own.numbers() == its.numbers()
    if count is not beside_what_is_set_up:
        assert len(step.captures) == 1
    model[0].calls, ordinary[0].calls = 40, 40
    step(X), ordinary(X)
    assert model[0].numbers() == ordinary[0].numbers()


def test_what_validation_runs_is_not_counted() -> None:
    model = Counts(calls)
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    step(X)
    assert step.validate(X).ok
    assert model.calls == 1


def decides(model: Any, x: Tensor) -> None:
    model.calls += 1
    if model.calls > 100:
        model.seen = 0


def decides_by_truth(model: Any, x: Tensor) -> None:
    model.calls += 1
    if not model.calls % 10:
        model.seen = 0


def decides_by_kind(model: Any, x: Tensor) -> Any:
    model.calls += 1
    return 2 if isinstance(model.calls, int) and model.calls == 3 else None


def goes_on(model: Any, x: Tensor) -> Any:
    model.calls += 1
    try:
        return 1 + (model.calls >= 3)
    except Exception:
        return 1


def factor(model: Any, x: Tensor) -> Any:
    model.calls += 1
    return 1 / model.calls


def as_a_size(model: Any, x: Tensor) -> Any:
    model.calls += 1
    return torch.ones(model.calls).sum()


def as_a_key(model: Any, x: Tensor) -> Any:
    model.calls += 1
    return {1: 1.0}.get(model.calls, 2.0)


def as_another(model: Any, x: Tensor) -> None:
    model.calls += 1
    model.other = model.calls


def by_values(model: Any, x: Tensor) -> None:
    model.calls += (x > 0).sum().item()


READERS = [
    decides, decides_by_truth, decides_by_kind, goes_on, factor, as_a_size, as_a_key, as_another, by_values,
]  # fmt: skip


@pytest.mark.parametrize("count", READERS)
def test_numbers_that_are_read_otherwise_are_refused(count: Callable[[Any, Tensor], Any]) -> None:
    model = Counts(count)
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"the code changes Counts.calls"):
        step(X)
    assert model.numbers() == (0, 3, 1.0, 0)


def test_a_size_that_is_kept_and_read_has_a_graph_for_each_value() -> None:
    def doubled_after_a_larger_one(model: Any, x: Tensor) -> Any:
        before, model.seen = model.seen, x.shape[0]
        return 2 if before == 4 else 1

    model = Counts(doubled_after_a_larger_one)
    ordinary = copy.deepcopy(model)
    step = psg_fx.transform(model, lambda o: o.sum(), backend="eager")
    for size in (4, 5):
        torch.testing.assert_close(step(X[:size]).losses.sum(), ordinary(X[:size]).sum())
        assert model.seen == size
