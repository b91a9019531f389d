"""A parameter spread over the rows of all samples: which row is whose follows from what the rows meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from external.program import Problem, Program, check, drop_in, with_loss
from psg_fx import SamplesMixed
from support.selection import at_once

B, T, WIDTH = 4, 3, 6
X = torch.randn(B, T, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """`function(self, rows)` of rows `[T * B, D]`, all of one time side by side, or `[B * T, D]`."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], by_time: bool) -> None:
        super().__init__()
        self.layer, self.row, self.scale = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.randn(1, WIDTH)),
            nn.Parameter(torch.randn(WIDTH)),
        )
        self.function, self.by_time = function, by_time

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.by_time else x
        h = self.function(self, x.reshape(-1, WIDTH)).tanh().view(x.shape)
        return h.transpose(0, 1) if self.by_time else h


def _twice(m: Net, rows: Tensor) -> Tensor:
    spread = m.row.expand(rows.shape[0], -1)
    return m.layer(rows) * spread + (spread * m.scale).sin()


def _nothing(rows: Tensor) -> Tensor:
    return rows.new_ones(rows.shape[0], 1)


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "added": lambda m, rows: m.layer(rows) + m.row.expand(rows.shape[0], -1),
    "like": lambda m, rows: m.layer(rows) * m.row.expand_as(rows),
    "times ones": lambda m, rows: m.layer(rows) + _nothing(rows) * m.row,
    "repeated": lambda m, rows: m.layer(rows) + m.row.repeat(rows.shape[0], 1),
    "changed before": lambda m, rows: m.layer(rows) * (m.row.expand_as(rows) * m.scale).sin(),
    "with a product": lambda m, rows: torch.addmm(m.row.expand(rows.shape[0], -1), rows, m.layer.weight),
    "instead": lambda m, rows: torch.where(rows > 0, m.layer(rows), m.row.expand_as(rows)),
    "side by side": lambda m, rows: F.linear(torch.cat([rows, m.row.expand_as(rows)], 1), m.layer.weight.repeat(1, 2)),
    "between": lambda m, rows: torch.lerp(m.layer(rows), m.row.expand_as(rows), m.scale.sigmoid()),
    "twice": _twice,
}


@pytest.mark.parametrize("by_time", [True, pytest.param(False, marks=pytest.mark.rest)])
@pytest.mark.parametrize("names", at_once([list(FUNCTIONS)[k::2] for k in range(2)], FUNCTIONS))
def test_exact(names: tuple[str, ...], by_time: bool) -> None:
    def several(m: Any, rows: Tensor) -> Tensor:
        return sum(((k + 1) * FUNCTIONS[name](m, rows) for k, name in enumerate(names)), torch.zeros_like(rows))

    check(Program("-".join(names), lambda: Problem(Net(several, by_time).double(), X)), with_loss)


def test_without_a_loss() -> None:
    check(Program("added", lambda: Problem(Net(FUNCTIONS["added"], True).double(), X)), drop_in)


class TwoViews(nn.Module):
    """Two views of each sample in one batch of 2B rows."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.row, self.after = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, WIDTH)), after

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([x[:, 0], x[:, 1]])
        spread = self.row.expand(rows.shape[0], -1)
        first, second = (self.layer(rows) + spread).tanh().view(2, -1, WIDTH)
        return (first - second).square() + self.after(spread)


def test_views() -> None:
    check(Program("views", lambda: Problem(TwoViews(lambda spread: spread.new_zeros(())).double(), X)), with_loss)


class Encoder(nn.Module):
    """Two views of each sample through one encoder, as of images: a token, kinds of tokens, a mask for all."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.kinds = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Embedding(2, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.flip(1)])
        kinds = torch.zeros(x.shape[0], T + 1, dtype=torch.int64)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.kinds(kinds)
        mask = torch.ones(x.shape[0], 1, T + 1, T + 1, dtype=torch.bool).tril()
        q, k, v = (h.unflatten(-1, (2, 3)).transpose(1, 2) for h in self.layer(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        first, second = self.head(h.sin().mean(1)).view(2, -1, 2)
        return first * second.cos()  # type: ignore[no-any-return]


def test_an_encoder_of_two_views() -> None:
    check(Program("encoder", lambda: Problem(Encoder().double(), X)), with_loss)


class Recurrent(nn.Module):
    """Two views through one layer, whose first state torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer(torch.cat([x, x.sin()]))[0].sum(1).chunk(2)
        return first - second.square()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:one graph for each batch size")
def test_a_recurrent_layer_of_two_views() -> None:
    check(Program("recurrent", lambda: Problem(Recurrent().double(), X)), with_loss)


def test_rows_that_are_met_in_two_orders() -> None:
    """The same rows cannot be of one sample here, and of another there."""
    model = TwoViews(
        lambda spread: (spread.unflatten(0, (spread.shape[0] // 2, 2)) * torch.tensor([[1.0], [2.0]])).sum(1)
    ).double()
    with pytest.raises(SamplesMixed, match=r"(?s)in the backward pass.*expand"):
        with_loss(Problem(model, X))


REPEATED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one for each sample": lambda m, x: m.row.expand(x.shape[0], -1),
    "of zeros": lambda m, x: x.new_zeros(x.shape[0], WIDTH) + m.row,
    "through a layer": lambda m, x: m.layer(m.row.expand(x.shape[0], -1)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_is_repeated_and_met_in_another_order_is_refused(name: str) -> None:
    """One row for each sample, repeated side by side, and met by the rows of one sample after the other."""

    class Repeats(Net):
        def forward(self, x: Tensor) -> Tensor:
            spread = REPEATED[name](self, x)
            return (spread.repeat(T, 1) * x.flatten(0, 1)).view(x.shape) if self.by_time else spread[:, None] * x

    exact = Repeats(lambda m, rows: rows, False).double()
    check(Program("spread", lambda: Problem(exact, X)), with_loss)
    with pytest.raises(SamplesMixed, match="in the backward pass"):
        with_loss(Problem(Repeats(lambda m, rows: rows, True).double(), X))
