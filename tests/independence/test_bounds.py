"""Bounds of integers, held against the values that a program of one sample has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx.passes.independence.bounds import bounds

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "remainder": lambda t: t.remainder(7),
    "remainder of a number": lambda t: torch.remainder(torch.full_like(t, 9), 4) + t.remainder(3),
    "remainder of a float": lambda t: t.double().remainder(2.5).long(),
    "clamp to numbers": lambda t: t.clamp(-2, 5),
    "clamp with min": lambda t: torch.zeros_like(t).clamp(min=t.remainder(9)),
    "clamp with max": lambda t: torch.zeros_like(t).clamp(max=-t.remainder(4)),
    "clamp with both": lambda t: t.clamp(min=t.remainder(5) - 9, max=3 + t.remainder(4)),
    "clamp with min above max": lambda t: t.clamp(min=t.remainder(5) + 9, max=3 + t.remainder(4)),
    "clip": lambda t: torch.ones_like(t).clip(min=t.remainder(9)),
    "clamp_min": lambda t: torch.clamp_min(torch.zeros_like(t), t.remainder(9)),
    "clamp_max": lambda t: torch.clamp_max(torch.zeros_like(t), 3 - t.remainder(9)),
    "the lesser": lambda t: torch.minimum(t, t.remainder(9)) + torch.min(t.remainder(4), t.remainder(7) - 2),
    "the greater": lambda t: torch.maximum(t, t.remainder(9)) - torch.max(t.remainder(4), t.remainder(7) - 2),
    "the lesser of floats": lambda t: torch.fmin(t.remainder(5).double(), torch.fmax(t.double(), t.remainder(3) - 9.0)),
    "add": lambda t: t.remainder(5) + 3 + t.remainder(2),
    "add a multiple": lambda t: torch.add(t.remainder(5), t.remainder(3), alpha=4),
    "sub": lambda t: t.remainder(5) - t.remainder(3),
    "mul": lambda t: (t.remainder(5) - 2) * (t.remainder(7) - 3),
    "where": lambda t: torch.where(t > 2, t.remainder(5) - 9, t.remainder(3)),
    "of bools": lambda t: (t > 3).long() + (t > 1),
    "repeats": lambda t: torch.repeat_interleave(torch.ones(4, dtype=torch.int64)) + t[:4].remainder(2),
    "repeated": lambda t: t.remainder(5).repeat_interleave(2),
    "bytes of another dtype": lambda t: torch.ones(6).view(torch.int32) + t.remainder(2),
    "a part of several": lambda t: t.remainder(5).split(2)[1] - t.remainder(3).chunk(3)[0] + t.remainder(2).unbind()[1],
    "the largest": lambda t: t.remainder(5).view(2, 3).max(1).values + t.view(2, 3).max(1).indices,
    "sorted": lambda t: t.remainder(5).sort().values + t.sort().indices,
    "sorted stably": lambda t: t.remainder(5).sort(stable=True).values + t.sort(stable=True).indices,
    "places": lambda t: t.argmax() + t.view(2, 3).argmin(1) + t.argsort()[:2],
    "numbers": lambda t: torch.arange(3, 15, 2) + t.remainder(2),
    "without digits": lambda t: torch.full((6,), 0.7).long() - (t.remainder(2) - 0.5).long(),
    "a small dtype": lambda t: (t.remainder(100).to(torch.int8) + 100).long(),
    "moved": lambda t: t.remainder(5).view(2, 3).T.flip(0).roll(1).reshape(-1)[1:].index_select(0, t.remainder(5)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_value_lies_within_its_bounds(name: str) -> None:
    checked: list[str] = []

    class Checked(Interpreter):
        def run_node(self, n: Node) -> object:
            value = super().run_node(n)
            if isinstance(value, Tensor) and n.op == "call_function":
                low, high = bounds(n)
                assert low <= value.min(), n
                assert value.max() <= high, n
                checked.append(n.name)
            return value

    torch.manual_seed(0)
    for _ in range(20):
        t = torch.randint(-20, 20, (6,))
        Checked(make_fx(PROGRAMS[name], tracing_mode="fake")(t)).run(t)
    assert checked


LEAVES = {
    "the lesser": lambda t: torch.minimum(t, torch.full_like(t, 3)),
    "the greater": lambda t: torch.maximum(t, torch.zeros_like(t)) * 4,
    "clamp with min": lambda t: torch.clamp(torch.zeros_like(t), min=t.remainder(9)),
    "clamp with max": lambda t: torch.clamp(torch.zeros_like(t), max=-t.remainder(2)),
    "clip": lambda t: torch.zeros_like(t).clip(min=t.remainder(9)),
    "clamp_min": lambda t: torch.clamp_min(torch.zeros_like(t), t.remainder(9)),
}
"""Rows of four each, of which one of another sample is picked."""


class Picked(nn.Module):
    def __init__(self, picks: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.picks = nn.Linear(3, 3).double(), picks

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rows = self.layer(x).reshape(-1, 3)
        return rows[torch.arange(x.shape[0]) * 4 + self.picks(t)].sum(-1)


@pytest.mark.parametrize("name", LEAVES)
def test_rows_of_other_samples_are_not_picked(name: str) -> None:
    step = psg_fx.transform(Picked(LEAVES[name]), lambda out, y: (out * y).sum(), backend="eager")
    x, t = torch.randn(5, 4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 1, 0])
    with pytest.raises(psg_fx.SamplesMixed):
        step((x, t), torch.ones(5, dtype=torch.float64))
