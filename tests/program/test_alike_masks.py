"""A mask that the code makes twice picks as many rows both times: `loss(o[y != -100], y[y != -100])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from support import oracle

X = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(5, (5, 6), generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor, Tensor], Tensor]


def first(o: Tensor) -> Tensor:
    return o[..., 0]


def the_rest(o: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(first(o)[~(y > 1)], y[~(y > 1)].double())


def between(o: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(first(o)[(y > 0) & (y < 4)], y[(y > 0) & (y < 4)].double())


def of_a_view(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o.view(-1, 5)[y.view(-1) != 2, 0], y.view(-1)[y.view(-1) != 2].double())


def listed(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(first(o)[(y != 2).nonzero(as_tuple=True)], y[torch.where(y != 2)].double())


def selected(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(first(o).masked_select(torch.ne(y, 2)), torch.masked_select(y, mask=torch.ne(y, 2)).double())


def written_between(o: Tensor, y: Tensor) -> Tensor:
    """The second mask is another one."""
    y, h = y.clone(), first(o)
    some = h[y > 1].sum()
    y[:, 0] = 0
    return some.square() + h[y > 1].sum().sin()


def mask_written_between(o: Tensor, y: Tensor) -> Tensor:
    h, m = first(o), y > 1
    m[:, 0] = False
    return h[m].sum().square() + h[y > 1].sum().sin()


def written_by_a_mask(o: Tensor, y: Tensor) -> Tensor:
    """Of two that are alike, the second one."""
    kept, some = y > 1, y > 1
    some[y == 3] = False
    return (first(o) * kept).sum().square() + (first(o) * some).sum().sin()


def written_through_a_view(o: Tensor, y: Tensor) -> Tensor:
    kept, some = y > 1, y > 1
    some[:, :2].zero_()
    return (first(o) * kept).sum().square() + (first(o) * some).sum().sin()


def written_unseen(o: Tensor, y: Tensor) -> Tensor:
    y, h = y.clone(), first(o)
    some = h[y > 1].sum()
    y.data[:, 0] = 0
    return some.square() + h[y > 1].sum().sin()


def of_other_numbers(o: Tensor, y: Tensor) -> Tensor:
    h = first(o)
    return sum((h[y == k].sum() * (k + 1)).sin() for k in range(3)) + h[y == True].sum()  # type: ignore[return-value]  # noqa: E712


LOSSES: list[Loss] = [
    the_rest, between, of_a_view, listed, selected, written_between, mask_written_between, written_by_a_mask,
    written_through_a_view, written_unseen,
    of_other_numbers,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_exact(loss: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    step = psg_fx.transform(model, loss, quantities=psg_fx.Grads(), backend="eager")
    for size in (5, 2):
        want = oracle.loop_grads(model, loss, X[:size], Y[:size])[1]
        assert oracle.worst_error(step(X[:size], Y[:size]).grads, want) < 1e-12
