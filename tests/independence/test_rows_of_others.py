"""Rows of other samples, and numbers of samples, where they are not seen at first sight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported, Rows, SamplesMixed
from support import oracle

Forward = Callable[[Any, Tensor, Tensor], Tensor]
T = 2


class Model(nn.Module):
    """`forward(layer, x, ids)` with x `[B, 2, 3]` and ids `[B, 2]`."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.run = nn.Linear(3, 3).double(), forward

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = self.run(self.layer, x, ids)
        return (out * torch.arange(1.0, out.shape[1] + 1)).sum(1)


def batch(size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(size)
    x = torch.randn(size, T, 3, dtype=torch.float64)
    return (x, torch.randint(0, 3, (size, T))), torch.randn(size, dtype=torch.float64)


def loss(out: Tensor, y: Tensor) -> Tensor:
    return (out * y).sum()


def rows_in(layer: Any, x: Tensor, turned: bool) -> Tensor:
    """[2 B, 3]: sample by sample, or place by place."""
    rows = layer(x)
    return (rows.transpose(0, 1) if turned else rows).reshape(-1, 3)


def places(x: Tensor, turned: bool) -> Tensor:
    numbers = torch.arange(T * x.shape[0])
    return numbers.view(-1, T).t().reshape(-1) if turned else numbers


def put(turned: bool, picked: bool) -> Forward:
    def forward(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
        onto = torch.zeros(T * x.shape[0], 3, dtype=torch.float64)
        return onto.index_put((places(x, picked),), rows_in(layer, x, turned)).view(-1, 6)

    return forward


def drawn_between(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.normal(rows_in(layer, x, True), rows_in(layer, x, False).abs() + 0.1).view(-1, 6)


def number_drawn(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    numbers = torch.normal(torch.arange(x.shape[0]).double(), 1e-14)
    return layer(x).flatten(1) * numbers[:, None]  # type: ignore[no-any-return]


def sorted_stably(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    picks = torch.sort((torch.cat([ids, ids], 1) > 0).long(), dim=1, stable=True).indices[:, 0]
    return layer(x).reshape(-1, 3)[torch.arange(x.shape[0]) * T + picks]  # type: ignore[no-any-return]


def in_int8(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    return layer(x)[torch.arange(x.shape[0]).to(torch.int8).long()].flatten(1)  # type: ignore[no-any-return]


def counted_in_int8(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    return layer(x)[torch.arange(x.shape[0], dtype=torch.int8).long()].flatten(1)  # type: ignore[no-any-return]


def added(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    order = torch.argsort(ids.flatten(), stable=True)
    rows = layer(x).flatten(0, 1)
    onto = torch.full_like(rows.detach(), 5.0)
    summed = torch.scatter(onto, 0, order[:, None].expand(-1, 3), rows.detach()[order], reduce="add")
    return (summed * rows).view(-1, 6)


def order_in_bools(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = layer(x).flatten(0, 1)
    order = torch.argsort(ids.flatten(), stable=True)
    return torch.zeros_like(rows).index_add(0, order.bool().long(), rows[order]).view(-1, 6)


class NumberOfSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[0], x.shape[0] + 3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def in_a_function(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    return NumberOfSamples.apply(layer(x)).flatten(1)  # type: ignore[no-any-return]


REFUSED: dict[str, Forward] = {
    "written by rows in another order": put(turned=False, picked=True),
    "written in rows of another order": put(turned=True, picked=False),
    "drawn around another sample": drawn_between,
    "drawn around the number of the sample": number_drawn,
    "places of a stable sort": sorted_stably,
    "numbers cast to int8": in_int8,
    "numbers in int8": counted_in_int8,
    "scatter that adds": added,
    "an order cast to bools": order_in_bools,
    "where arange begins, in a custom function": in_a_function,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    (x, ids), y = batch(4)
    with pytest.raises((SamplesMixed, NotYetSupported)):
        psg_fx.transform(Model(REFUSED[name]), loss, backend="eager")((x, ids), y)


@pytest.mark.parametrize("turned", [False, True])
def test_rows_that_are_written_as_they_lie(turned: bool) -> None:
    model = Model(put(turned, turned))
    step = psg_fx.transform(model, loss, backend="eager")
    for size in (4, 1, 3):
        x, y = batch(size)
        assert oracle.worst_error(step(x, y).grads, oracle.loop_grads(model, loss, x, y)[1]) < 1e-12


class Experts(nn.Module):
    """Ids that are no expert's count for the first or the last one, or for none."""

    def __init__(self, clamped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.clamped = nn.Parameter(torch.randn(3, 8, 8)), clamped

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, each = x.reshape(-1, 8), ids.reshape(-1)
        order = torch.argsort(each, stable=True)
        counts = ((each.clamp(0, 2) if self.clamped else each)[:, None] == torch.arange(3)).sum(0)
        out = torch._grouped_mm(rows[order], self.weight, offs=counts.cumsum(0).to(torch.int32))
        return out[torch.argsort(order)].view(x.shape[0], -1).sum(1)  # type: ignore[no-any-return]


def test_ids_that_may_count_for_another_expert_are_refused() -> None:
    x, ids = torch.randn(3, 4, 8), torch.randint(0, 3, (3, 4))
    with pytest.raises(NotYetSupported):
        psg_fx.transform(Experts(clamped=True), loss, backend="eager")((x, ids), torch.ones(3))


def test_negative_ids_which_move_the_rows_of_others_make_nan() -> None:
    model, x, ids = Experts(clamped=False), torch.randn(3, 4, 8), torch.randint(0, 3, (3, 4))
    step = psg_fx.transform(model, loss, backend="eager")
    step((x, ids), torch.ones(3))
    ids[1, 2] = -1
    losses = step((x, ids), torch.ones(3)).losses
    assert losses[1].isnan()
    for b in (0, 2):
        torch.testing.assert_close(losses[b], model(x[b : b + 1], ids[b : b + 1]).sum())


ALL, SAME = (lambda w, ids: w), (lambda w, ids: w * (ids[:, None] == ids[None, :]))
WEIGHTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "none": (ALL, False),
    "tanh": (lambda w, ids: w.tanh(), False),
    "multiplied by a mask": (SAME, True),
    "multiplied by a mask of ones": (lambda w, ids: w * (ids[:, None] < 100 + ids[None, :]), False),
    "where": (lambda w, ids: torch.where(ids[:, None] == ids[None, :], w, 0.0), True),
    "filled": (lambda w, ids: w.masked_fill(ids[:, None] != ids[None, :], 0.0), True),
    "filled with another number": (lambda w, ids: w.masked_fill(ids[:, None] != ids[None, :], 1.0), False),
    "a softmax, scaled": (
        lambda w, ids: 2 * w.masked_fill(ids[:, None] != ids[None, :], -torch.inf).softmax(-1), True,
    ),
    "other weights beside a softmax": (
        lambda w, ids: w + w.masked_fill(ids[:, None] != ids[None, :], -torch.inf).softmax(-1), False,
    ),
}  # fmt: skip


class Pairs(nn.Module):
    """Rows weighed by pairs of them; projections begin with zeros, so that the first weights are 0 without a mask."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.weigh = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), weigh
        nn.init.zeros_(self.query.weight)
        self.double()

    def forward(self, x: Tensor, ids: Tensor, samples: int) -> Tensor:
        weights = self.weigh(self.query(x) @ self.key(x).T, ids)
        return x.new_zeros(samples, 4).index_add(0, ids, weights @ x).sum(1)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_pairs_are_0_by_a_mask_and_not_by_chance(name: str) -> None:
    weigh, right = WEIGHTS[name]
    model, ids, rows = Pairs(weigh), torch.tensor([0, 0, 1, 1, 1, 2]), Rows("ids")
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    step = psg_fx.transform(model, lambda out, y: out * y, backend="eager", batch_dim=((rows, rows, 0), 0))
    if not right:
        with pytest.raises((NotYetSupported, SamplesMixed)):
            step((x, ids, 3), y)
        return
    grads = step((x, ids, 3), y).grads
    for b in range(3):
        own = x[ids == b]
        alone = (model(own, torch.zeros(len(own), dtype=torch.int64), 1) * y[b]).sum()
        want = torch.autograd.grad(alone, list(model.parameters()))
        for (parameter, _), g in zip(model.named_parameters(), want, strict=True):
            torch.testing.assert_close(grads[parameter][b], g, rtol=1e-10, atol=1e-12)
