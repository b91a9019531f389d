"""Numbers of the batch size that a model without a loss returns are those of the call, whatever a capture has tried."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import psg_fx


@dataclass
class Info:
    n: Any


class Counting(nn.Module):
    """Returns a layer's outputs, changed, and what is made of their number."""

    def __init__(self, change: Callable[[Tensor], Tensor], made: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.change, self.made = nn.Linear(4, 3), change, made

    def forward(self, x: Tensor) -> Any:
        return self.change(self.layer(x)), self.made(x.shape[0])


def plain(h: Tensor) -> Tensor:
    return h.tanh()


def tried_alone(h: Tensor) -> Tensor:
    return h[:, None].squeeze().tanh()  # of one sample it has one dim


def numbers(n: Any) -> dict[str, Any]:
    return {"n": n, "twice": 2 * n, "half": n / 2}


def texts(n: Any) -> dict[str, Any]:
    return {"twice": 2.0 * int(n), "text": f"{int(n)} samples"}


RETURNED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "numbers": (plain, numbers),
    "numbers beside a squeeze": (tried_alone, numbers),
    "a graph for each size": (plain, texts),
    "a namespace": (plain, lambda n: types.SimpleNamespace(n=n)),
    "a dataclass in a list": (plain, lambda n: [Info(n)]),
}


@pytest.mark.parametrize("name", RETURNED)
def test_they_are_those_of_the_call(name: str) -> None:
    change, made = RETURNED[name]
    model = Counting(change, made)
    step = psg_fx.transform(model, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one graph for each batch size")
        for batch in (5, 3, 7):
            out, found = step(torch.randn(batch, 4))
            assert out.shape == (batch, 3)
            assert found == made(batch)
            step.zero_grad()


@pytest.mark.parametrize("made", [lambda n: slice(0, n), lambda n: lambda: n], ids=["a slice", "a function"])
def test_what_hides_one_is_refused(made: Callable[[Any], Any]) -> None:
    step = psg_fx.transform(Counting(plain, made), backend="eager")
    with pytest.raises(psg_fx.NotYetSupported, match="that holds a number of the batch size"):
        step(torch.randn(5, 4))


def test_dropout_of_a_padded_sequence() -> None:
    """Whether its padding treats one sample otherwise is tried without dropout."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.drop = nn.GRU(3, 4, batch_first=True), nn.Dropout(0.5)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.drop(self.drop(out).masked_fill(out.abs().sum(-1, True) == 0, 0)).sum((1, 2))

    torch.manual_seed(0)
    step = psg_fx.transform(Padded(), lambda out: out.sum(), quantities=psg_fx.Norms(), backend="eager")
    assert step((torch.randn(3, 5, 3), torch.tensor([2, 5, 3]))).norms.isfinite().all()
