"""Rows picked by the places that a mask lists, `x[torch.where(m)]`, and rows of which one may lose its dim."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psg_fx import NotYetSupported
from support.programs import C, Refused, Row, check_answer, check_refusal, head

Loss = Callable[[Tensor, Tensor], Tensor]


def several(size: int) -> tuple[Tensor, Tensor]:
    """Of each sample, which of C places count: the first does."""
    chosen = (torch.arange(size)[:, None] + torch.arange(C)) % 2
    chosen[:, 0] = 1
    return torch.randn(size, 4).double(), chosen


def whole(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4).double(), torch.arange(1, size + 1) % 3


def by_where(o: Tensor, t: Tensor) -> Tensor:
    places = torch.where(t != 0)
    return F.binary_cross_entropy_with_logits(o[places], torch.ones_like(o)[places])


def by_two_columns(o: Tensor, t: Tensor) -> Tensor:
    rows, columns = torch.where(t != 0)
    return o[rows, columns].square().mean()


def by_nonzero(o: Tensor, t: Tensor) -> Tensor:
    return o[(t != 0).nonzero(as_tuple=True)].square().mean()


def by_its_columns(o: Tensor, t: Tensor) -> Tensor:
    places = t.nonzero()
    return o[places[:, 0], places[:, 1]].exp().sum()


def flat(o: Tensor, t: Tensor) -> Tensor:
    places = (t.view(-1) != 0).nonzero().squeeze(-1)
    return o.view(-1).index_select(0, places).square().mean()


def of_rows(o: Tensor, t: Tensor) -> Tensor:
    places = torch.where(t > 0)[0]
    return F.cross_entropy(o[places], t[places], reduction="sum")


def of_rows_flattened(o: Tensor, t: Tensor) -> Tensor:
    return o[torch.nonzero(t > 0).flatten()].square().sum()


def of_numbered_rows(o: Tensor, t: Tensor) -> Tensor:
    places = torch.arange(o.shape[0])[t > 0]
    return F.nll_loss(o.log_softmax(1)[places], t[places], reduction="sum")


def weighted(o: Tensor, t: Tensor) -> Tensor:
    places = torch.where(t > 0)[0]
    weights = torch.full((places.numel(),), 0.5, dtype=o.dtype)
    return (F.cross_entropy(o[places], t[places], reduction="none") * weights).sum()


def marked(o: Tensor, t: Tensor) -> Tensor:
    places, marks = torch.where(t > 0)[0], torch.zeros_like(o)
    marks[places, t[places]] = 1
    return (marks * o.sigmoid()).sum()


def put(o: Tensor, t: Tensor) -> Tensor:
    """Where nothing is attended to, all is (Mask2Former)."""
    seen = (o > 0.3).detach()
    seen[torch.where(seen.sum(-1) < 3)] = True
    return (seen * o).square().mean()


def put_by_columns(o: Tensor, t: Tensor) -> Tensor:
    o = o * 1
    rows, columns = torch.where(t != 0)
    o[rows, columns] = 0.5
    return o.exp().sum()


def put_values(o: Tensor, t: Tensor) -> Tensor:
    o, places = o * 1, (t != 0).nonzero(as_tuple=True)
    o[places] = o[places].square()
    return o.exp().sum()


def added(o: Tensor, t: Tensor) -> Tensor:
    places = torch.where(t != 0)
    return o.index_put(places, o[places].sin(), accumulate=True).square().sum()


def filled(o: Tensor, t: Tensor) -> Tensor:
    return o.index_fill(0, torch.where(t > 1)[0], 0.5).exp().sum()


def row_squeezed(o: Tensor, t: Tensor) -> Tensor:
    return o[t > 0].squeeze().square().sum()


ROWS = {f.__name__: Row(head, f, several) for f in (by_where, by_two_columns, by_nonzero, by_its_columns, flat)}
ROWS |= {f.__name__: Row(head, f, several) for f in (put, put_by_columns, put_values, added)}
ROWS |= {f.__name__: Row(head, f, whole) for f in (of_rows, of_rows_flattened, row_squeezed, filled)}
ROWS |= {f.__name__: Row(head, f, whole) for f in (of_numbered_rows, weighted, marked)}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_places(row: Row) -> None:
    check_answer(row, (6, 1))


def one_place_squeezed(o: Tensor, t: Tensor) -> Tensor:
    return o[(t > 0).nonzero().squeeze()].sum(0).square().sum()


def one_row_squeezed(o: Tensor, t: Tensor) -> Tensor:
    """Of one row, the sum is that of its elements."""
    return o[t > 0].squeeze().sum(0).square().sum()


def one_row_counted(o: Tensor, t: Tensor) -> Tensor:
    rows = o[t > 0].squeeze()
    return rows.square().sum() / rows.shape[0]


def by_the_first_dim(o: Tensor, t: Tensor) -> Tensor:
    return o[torch.where(o > 0)[0]].sum()


def of_two_kinds(o: Tensor, t: Tensor) -> Tensor:
    """Rows of two kinds, computed apart and put back: the places are joined."""
    i, j = (t > 0).nonzero()[:, 0], (t <= 0).nonzero()[:, 0]
    return torch.cat([o[i], 2 * o[j]])[torch.cat([i, j]).argsort()].square().sum()


def stacked(o: Tensor, t: Tensor) -> Tensor:
    i = (t > 0).nonzero()[:, 0]
    return o[i].square().sum() + o[torch.stack([i, i])].sum()


UNLIKE: dict[str, Refused] = {
    f.__name__: (head, f, whole, NotYetSupported, "cannot be shown to keep samples apart")
    for f in (one_place_squeezed, one_row_squeezed, one_row_counted, by_the_first_dim, of_two_kinds, stacked)
}


@pytest.mark.parametrize("row", UNLIKE.values(), ids=UNLIKE)
def test_refused(row: Refused) -> None:
    check_refusal(row)
