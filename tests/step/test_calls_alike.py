"""A call like the last one is not taken apart again: whatever tells two calls apart is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import BadArgument
from psg_fx.program.arguments.apart import Apart
from psg_fx.program.arguments.key import call_key

X, Y = torch.randn(4, 3, dtype=torch.float64), torch.arange(4) % 2


def test_values_are_those_of_the_call() -> None:
    apart = Apart(0)
    first, second = (apart(((X + k,), {}), ((Y,), {})) for k in range(2))
    third = apart(((X + 2,), {}), ((Y,), {}))
    assert call_key(third) is call_key(second)
    assert call_key(third) == call_key(first)
    assert third.tensors[0].equal(X + 2)
    assert second.tensors[0].equal(X + 1)
    assert third.batch_size() == 4


OTHERS: dict[str, Callable[[], Tensor]] = {
    "dtype": X.float,
    "requires_grad": lambda: X.clone().requires_grad_(),
    "order in memory": lambda: X.t().contiguous().t(),
    "size": lambda: X[:, :2],
    "dims": lambda: X.unsqueeze(1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_description_is_another_key(other: str) -> None:
    apart = Apart(0)
    before = [apart(((X,), {}), ((Y,), {})) for _ in range(2)][-1]
    after = apart(((OTHERS[other](),), {}), ((Y,), {}))
    assert call_key(after) != call_key(before)
    assert call_key(apart(((X,), {}), ((Y,), {}))) == call_key(before)


def test_names_and_places_tell_calls_apart() -> None:
    apart = Apart(0)
    calls = [({"a": X, "b": X}, ()), ({"b": X, "a": X}, ()), ({"a": X}, (X,)), ({}, (X, X))]
    keys = [call_key(apart((args, named), ((Y,), {}))) for named, args in calls for _ in range(2)]
    assert len(set(keys)) == len(calls)


REFUSED: dict[str, Callable[[], Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor(list(X), layout=torch.jagged),
    "nested and strided": lambda: torch.nested.nested_tensor(list(X)),
    "sparse": X.to_sparse,
    "meta": lambda: X.to("meta"),
    "another size": lambda: X[:3],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_refused_is_refused_after_a_call(refused: str) -> None:
    torch.manual_seed(0)
    step = psg_fx.transform(nn.Linear(3, 2).double(), F.cross_entropy, backend="eager")
    for _ in range(2):
        step(X, Y)
    other = REFUSED[refused]()
    with pytest.raises(BadArgument):
        step(other, Y)
    assert step(X, Y).losses.shape == (4,)
