"""Numbers that one sample alone lacks, on their way through functions, slices, tables, draws and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported, PsgError, SamplesMixed
from support import oracle

Forward = Callable[[Any, Tensor], Tensor]

LIBRARY = torch.library.Library("psg_fx_tests_composite", "FRAGMENT")


def composite(schema: str, function: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.psg_fx_tests_composite, name)


DIVIDED = composite("divided(Tensor x) -> Tensor", lambda x: x / x.shape[0])
ROLLED = composite("rolled(Tensor x) -> Tensor", lambda x: x * torch.arange(3.0).roll(x.shape[0], 0))
BOTH = composite("both(Tensor x) -> (Tensor, Tensor)", lambda x: (x * 2, x.mean(0)))


class Centre(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.mean(0)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0]


class Number(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        numbers = torch.arange(x.shape[0])
        ctx.mark_non_differentiable(numbers)
        return numbers

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        return None


class Model(nn.Module):
    """`forward(model, x)` with x `[B, 3]`, a linear layer, a vector and a number."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.run = nn.Linear(3, 3).double(), forward
        self.vector = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def loss(out: Tensor, y: Tensor) -> Tensor:
    return (out.flatten(1).sum(1) * y).sum()


def times(numbers: Callable[[Tensor], Tensor]) -> Forward:
    return lambda m, x: m.linear(x) * numbers(x)[:, None]


def put_back(rows: Callable[[Any, Tensor], Tensor]) -> Forward:
    """What is computed of the positive numbers, among zeros."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask, out = x > 0, torch.zeros_like(x)
        out[mask] = rows(m, m.linear(x)[mask])
        return out

    return forward


def into_rows(places: Callable[[Tensor], Tensor], times: int = 1) -> Forward:
    """Rows of all samples, several times one after the other, added to four rows of each."""

    def forward(m: Any, x: Tensor) -> Tensor:
        zeros = torch.zeros(x.shape[0] * 4, 3, dtype=x.dtype)
        return zeros.index_add(0, places(x), m.linear(x).repeat(times, 1)).view(x.shape[0], 4, 3)

    return forward


def refused(forward: Forward, kind: type[PsgError], words: str, loss_fn: Any = loss) -> None:
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    step = psg_fx.transform(Model(forward), loss_fn, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(kind, match=f"(?s){words}"):
        step(x, y if loss_fn is loss else x)


REFUSED: dict[str, tuple[Forward, type[PsgError], str]] = {
    "a mean among the outputs of a function": (
        lambda m, x: torch.sub(*Centre.apply(m.linear(x))).square(), SamplesMixed, "Centre .*over all samples"),
    "numbers of a function": (times(Number.apply), SamplesMixed, "Number .*numbers the samples"),
    "the batch size in a composite": (
        lambda m, x: DIVIDED(m.linear(x)), NotYetSupported, "divided computes with the batch size"),
    "the batch size as an int in a composite": (
        lambda m, x: ROLLED(m.linear(x)), NotYetSupported, "rolled computes with the batch size"),
    "a mean among the outputs of a composite": (
        lambda m, x: torch.sub(*BOTH(m.linear(x))), SamplesMixed, "both .*over all samples"),
    "every second number": (times(lambda x: torch.arange(2 * x.shape[0])[::2]), SamplesMixed, "numbers of the samples"),
    "numbers picked by numbers": (
        times(lambda x: torch.arange(x.shape[0]).index_select(0, torch.arange(x.shape[0]))),
        SamplesMixed, "numbers of the samples"),
    "numbers as a table": (
        times(lambda x: F.embedding(torch.arange(x.shape[0]), torch.arange(x.shape[0])[:, None])[:, 0]),
        SamplesMixed, "numbers of the samples"),
    "values that lie elsewhere than their rows": (
        into_rows(lambda x: (torch.arange(x.shape[0])[:, None] * 4 + torch.arange(3)).flatten(), 3),
        SamplesMixed, "does not hold the samples as the numbers"),
    "rows of another sample": (
        into_rows(lambda x: torch.arange(x.shape[0]) * 4 + x[:, 0].long()), SamplesMixed, "may lie outside of 0..3"),
    "rows of other numbers": (
        into_rows(lambda x: torch.arange(x.shape[0])), SamplesMixed, "does not number the rows"),
    "numbers that are scattered": (
        lambda m, x: m.linear(x) * torch.zeros_like(x, dtype=torch.int64).scatter(
            1, torch.zeros_like(x[:, :1], dtype=torch.int64), torch.arange(x.shape[0])[:, None]),
        SamplesMixed, "numbers of the samples"),
    "numbers as places within a sample": (
        lambda m, x: m.linear(x).scatter(1, torch.arange(x.shape[0])[:, None], 1.0), SamplesMixed, "numbers of the"),
    "numbers as places to gather": (
        lambda m, x: m.linear(x).gather(1, torch.arange(x.shape[0])[:, None]), SamplesMixed, "numbers of the samples"),
    "rows that are picked, divided by how many": (
        put_back(lambda m, rows: rows / rows.shape[0]), NotYetSupported, "index"),
    "rows that are picked, and an int of how many": (
        put_back(lambda m, rows: rows * torch.arange(3.0).roll(rows.shape[0], 0)[0]), NotYetSupported, "index"),
    "rows that are picked, and a tensor of how many": (
        put_back(lambda m, rows: rows * torch.full((), rows.shape[0])), NotYetSupported, "index"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_one_sample_alone_lacks(name: str) -> None:
    refused(*REFUSED[name])


def test_how_many_samples_without_a_loss() -> None:
    """A loss divided by B is that of one sample alone with B = 1; outputs are what they are."""
    step = psg_fx.transform(Model(lambda m, x: m.linear(x) / x.shape[0]), backend="eager")
    with pytest.raises(SamplesMixed, match="number of samples is among its values"):
        step(torch.randn(4, 3, dtype=torch.float64))


def test_how_many_a_mask_picks_in_a_loss() -> None:
    """Beside the sum, the number of rows is that of the batch: it is no number of a sample before."""
    refused(
        lambda m, x: m.linear(x), NotYetSupported, "index",
        lambda out, y: (out[y > 0].square() / out[y > 0].numel()).sum(),
    )  # fmt: skip


def centre_alone(m: Any, x: Tensor) -> Tensor:
    return Centre.apply(m.linear(x))[0]


def written(m: Any, x: Tensor) -> Tensor:
    """Row 4 i + 1 of all samples' is the parameter's."""
    rows = m.linear(x).repeat(1, 4).reshape(-1, 3)
    rows = rows.index_put((torch.arange(x.shape[0]) * 4 + 1,), m.vector)
    return rows.view(-1, 4, 3) * torch.arange(1.0, 5)[:, None]


def drawn(m: Any, x: Tensor) -> Tensor:
    """Between 0 and 1 for a sample alone: zeros."""
    return m.linear(x) * torch.randint(x.shape[0] - 1, x.shape[0], (x.shape[0], 3))


def divided(m: Any, x: Tensor) -> Tensor:
    whole = x.long()
    mask, out = whole > 0, torch.zeros_like(x)
    out[mask] = 12 // whole[mask] * m.scale
    return out + m.linear(x)


def rows_of(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four rows a sample, as [4 B, 3]; the places of three values of each among all rows, and what goes there."""
    rows = m.linear(x).repeat(1, 4).reshape(-1, 3) * torch.arange(1.0, 4, dtype=x.dtype)
    places = (torch.arange(x.shape[0])[:, None] * 4 + x.abs().long().clamp(0, 3)).flatten()
    return rows, places, (x @ m.linear.weight).flatten()[:, None] * m.vector


def summed(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(x.shape[0], 4, 3) * torch.arange(1.0, 5, dtype=x.dtype)[:, None]


def added(m: Any, x: Tensor) -> Tensor:
    rows, places, values = rows_of(m, x)
    zeros = torch.zeros(x.shape[0] * 4, 3, dtype=x.dtype)
    return summed(rows.index_add(0, places, values) + zeros.index_add_(0, places, values.square()), x)


def scattered(m: Any, x: Tensor) -> Tensor:
    rows, places, values = rows_of(m, x)
    wide = places[:, None].expand(-1, 3)
    rows = rows.scatter_add(0, wide, values).scatter_reduce(0, wide, values, "amax")
    return summed(rows, x) + rows.gather(0, wide).view(x.shape[0], 3, 3).sum(1, keepdim=True)


def copied(m: Any, x: Tensor) -> Tensor:
    rows, _, values = rows_of(m, x)
    places = torch.arange(x.shape[0]) * 4 + 2
    rows = rows.index_copy(0, places, values.view(-1, 3, 3).sum(1)).index_fill(0, places + 1, 2.0)
    return summed(rows.scatter(0, (places - 2)[:, None].expand(-1, 3), values.view(-1, 3, 3)[:, 0]), x)


def filled(m: Any, x: Tensor) -> Tensor:
    rows, _, _ = rows_of(m, x)
    return summed(rows.index_fill(0, torch.arange(x.shape[0]) * 4 + 1, m.scale), x)


EXACT = {
    "filled": filled,
    "written": written,
    "added": added,
    "scattered": scattered,
    "copied": copied,
    "drawn": drawn,
    "divided": divided,
    "a mean that nobody reads": centre_alone,
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact(name: str) -> None:
    """Among them a sample of which a mask picks no row: it divides by what others have, and counts nothing."""
    x = torch.tensor([[2.0, 0.5, 3.0], [0.0, 0.2, -1.0], [1.5, 0.0, 0.0]], dtype=torch.float64)
    y, model = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), Model(EXACT[name])
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    losses, grads = oracle.loop_grads(model, loss, x, y)
    out = step(x, y)
    torch.testing.assert_close(out.losses, losses)
    assert oracle.worst_error(out.grads, grads) < 1e-12


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its cross_entropy compares the rows of two masks")
def test_a_sample_without_a_label() -> None:
    """Classes from 1 on, 0 for none: what stands for a label of a sample that has none is a class."""
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.tensor([[1, 0, 2], [0, 0, 0], [3, 1, 0]])

    def labelled(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out[y > 0], y[y > 0] - 1, reduction="sum")

    model = Model(lambda m, x: m.linear(x)[:, None] * torch.arange(1.0, 4)[:, None])
    step = psg_fx.transform(model, labelled, quantities=psg_fx.Grads(), backend="eager")
    losses, grads = oracle.loop_grads(model, labelled, x, y)
    out = step(x, y)
    torch.testing.assert_close(out.losses, losses)
    assert oracle.worst_error(out.grads, grads) < 1e-12
