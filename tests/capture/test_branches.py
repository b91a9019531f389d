"""Branches on the batch size: one graph for all batches that take the branch of a batch of one; and code that catches
what a layer raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.errors import PsgError
from psg_fx.program.decisions.branches import Branch, Readings
from support import oracle


class Branching(nn.Module):
    """From 16 samples on, it goes on with what `larger` makes of the features."""

    def __init__(self, larger: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.larger = nn.Linear(3, 5).double(), nn.Linear(5, 3).double(), larger

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if x.shape[0] * 2 >= 32:
            x = self.larger(x)
        if x.shape[0] > 0:
            x = x + 1
        out: torch.Tensor = self.second(x)
        return out


def right(step: Callable[..., psg_fx.StepOutput], model: nn.Module, size: int) -> None:
    x, y = torch.randn(size, 3, dtype=torch.float64), torch.randint(0, 3, (size,))
    losses, truth = oracle.loop_grads(model, F.cross_entropy, x, y)
    out = step(x, y)
    assert oracle.worst_error(out.grads, truth) < 1e-12
    assert torch.allclose(out.losses, losses, rtol=1e-12, atol=0)


def served(step: psg_fx.LossModule) -> list[tuple[int | None, int | None]]:
    return [(found.batch_size, found.most) for found in step.captures]


@pytest.mark.parametrize("larger", [torch.Tensor.contiguous, lambda x: x * 3, lambda x: x - x.mean(0)])
def test_one_graph_for_small_batches(larger: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whatever larger ones compute."""
    model = Branching(larger)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (4, 1, 15, 2, 9):
        right(step, model, size)
    assert served(step) == [(None, 15)]


def test_larger_ones_that_compute_the_same() -> None:
    """Then the graph serves all; the one for small batches stays."""
    model = Branching(torch.Tensor.contiguous)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (4, 16, 40, 3, 17):
        right(step, model, size)
    assert served(step) == [(None, 15), (None, None)]


@pytest.mark.parametrize("larger", [lambda x: x.relu(), lambda x: x - x.mean(0)])
def test_larger_ones_that_compute_something_else(larger: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The loss of a sample is that of a batch of one."""
    model = Branching(larger)
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randint(0, 3, (16,))
    with pytest.raises(PsgError, match="is another one for another batch size"):
        step(x, y)
    right(step, model, 15)


def test_a_file_serves_all_batches(tmp_path: Path) -> None:
    step = psg_fx.transform(Branching(torch.Tensor.contiguous), F.cross_entropy, backend="eager")
    with pytest.raises(PsgError, match="serves up to 15 samples"):
        step.export(tmp_path / "step.pt2", torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))


B = sympy.Symbol("B", integer=True)


@pytest.mark.parametrize(
    ("decisions", "most"),
    [
        ([(B < 16, True)], 15), ([(B <= 16, True)], 16), ([(B >= 16, False)], 15), ([(2 * B > 7, False)], 3),
        ([(B < 16, True), (B < 9, True), (B > 0, True)], 8), ([(B > 0, True)], None), ([], None),
        ([(B < 16, True), (B**2 < 50, True)], None), ([(B % 2 < 1, False)], None),
    ],
)  # fmt: skip
def test_the_most_samples(decisions: list[tuple[sympy.Basic, bool]], most: int | None) -> None:
    branches = [Branch(*decision, "a line") for decision in decisions]
    assert Readings(branches).most() == most
    assert Readings(branches, numbers=["a line"]).most() is None


class Tolerant(nn.Module):
    """Layers are asked for more than some of them can, as libraries do (speechbrain's x-vectors)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4).double(), Named(), nn.Linear(4, 3).double()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            try:
                x = layer(x, scale=2.0)
            except TypeError:
                x = layer(x)
        return x


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        out: torch.Tensor = self.layer(x).tanh() * scale
        return out


def test_code_that_catches_what_a_layer_raises() -> None:
    model = Tolerant()
    step = psg_fx.transform(model, F.cross_entropy, backend="eager")
    for size in (4, 1):
        right(step, model, size)


class Shared(nn.Module):
    """One row for all samples, expanded where there are several."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.row, self.way = nn.Linear(3, 3).double(), nn.Parameter(torch.randn(1, 3).double()), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = self.layer(self.row)
        if row.shape[0] == 1 and x.shape[0] > 1:
            row = row.expand(x.shape[0], -1)
            row = row if self.way != "twice as much" else 2 * row
        if self.way == "added":
            return self.layer(x) * self.row + row
        return torch.cat([self.row.expand(len(x), 3), row, self.layer(x)], 1)[:, 2:5] + self.layer(x)


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("way", ["added", "joined"])
@pytest.mark.parametrize("sizes", [(3, 1, 4), (1, 3)])
def test_a_row_that_is_expanded_for_several(way: str, sizes: tuple[int, ...]) -> None:
    model = Shared(way)
    step = psg_fx.transform(model, F.cross_entropy, quantities=psg_fx.Grads(), backend="eager")
    for size in sizes:
        right(step, model, size)


def test_a_row_that_is_another_one_for_several() -> None:
    step = psg_fx.transform(Shared("twice as much"), F.cross_entropy, backend="eager")
    with pytest.raises(PsgError, match="treats a batch of one sample differently"):
        step(torch.randn(3, 3, dtype=torch.float64), torch.tensor([0, 1, 2]))


def by_a_condition(h: torch.Tensor) -> torch.Tensor:
    return h * (1 + int(h.shape[0] > 1))


def by_a_range(h: torch.Tensor) -> torch.Tensor:
    return h * sum(1.0 for _ in range(min(h.shape[0], 2)))


def by_a_list(h: torch.Tensor) -> torch.Tensor:
    return h * len([0] * min(h.shape[0], 2))


def by_a_fraction(h: torch.Tensor) -> torch.Tensor:
    return h * (1 + int(1 / h.shape[0]))


def by_a_root(h: torch.Tensor) -> torch.Tensor:
    return h * math.sqrt(min(h.shape[0], 2))


def by_a_maximum(h: torch.Tensor) -> torch.Tensor:
    return h / max(h.shape[0] - 1.0, 1.0)


def by_a_part(h: torch.Tensor) -> torch.Tensor:
    return h * h.chunk(min(h.shape[0], 2), 1)[0].sum(1, keepdim=True)


def by_a_dim(h: torch.Tensor) -> torch.Tensor:
    return h.cumsum(min(h.shape[0] - 1, 1))


NUMBERS = [by_a_condition, by_a_range, by_a_list, by_a_fraction, by_a_root, by_a_maximum, by_a_part, by_a_dim]


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_one_sample_has_otherwise(number: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Torch leaves out what they are for one, since it takes a batch size for at least two: exact, or refused."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return number(self.layer(x))

    model = Model()
    step = psg_fx.transform(model, lambda o: o.square().sum(), quantities=psg_fx.Grads(), backend="eager")
    for size in (4, 3, 1):
        x = torch.randn(size, 4)
        try:
            found = step(x)
        except PsgError:
            continue
        for i in range(size):
            loss = model(x[i : i + 1]).square().sum()
            torch.testing.assert_close(found.losses[i], loss.detach())


def test_code_without_a_file_is_the_users() -> None:
    known: dict[str, object] = {"nn": nn}
    exec(  # as `python -c` runs it
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x) * (2 if x.shape[0] == 1 else 1)\n",
        known,
    )
    model: nn.Module = known["Model"]()  # type: ignore[operator]
    with pytest.raises(PsgError, match="treats a batch of one sample differently"):
        psg_fx.transform(model, lambda o: o.square().sum(), backend="eager")(torch.randn(4, 4))
