"""Rows of several axes, or that a mask picks, written over others: of those with the same place the last one stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx.errors import NotYetSupported, SamplesMixed
from psg_fx.ops.last_rows import last_rows
from psg_fx.step import groups as of_groups
from psg_fx.step import rows as of_rows
from ragged.test_groups_of_rows import USERS
from ragged.test_groups_of_rows import check as check_groups
from support.graphs_of_nodes import BATCH_DIM, batches, graphs, losses, made, with_attributes
from support.rows_of_samples import Batch, check, usual
from support.selection import selected
from support.self_loops import Weighted


@pytest.mark.parametrize("kept", [None, "some", "none"])
@pytest.mark.parametrize("shape", [(9,), (9, 2), (0,)], ids=str)
def test_the_last_row_of_each_place(shape: tuple[int, ...], kept: str | None) -> None:
    """Written one row after the other, also to places counted from the end."""
    drawn = torch.Generator().manual_seed(1)
    index = torch.randint(-4, 4, shape, generator=drawn)
    mask = {
        None: torch.ones(shape) > 0,
        "some": torch.rand(shape, generator=drawn) > 0.4,
        "none": torch.ones(shape) < 0,
    }[kept]
    expected = torch.zeros(shape, dtype=torch.bool)
    for place in range(4):
        for column in range(shape[1] if len(shape) > 1 else 1):
            at, own = (t[:, column] if len(shape) > 1 else t for t in (index % 4, mask))
            rows = ((at == place) & own).nonzero()[:, 0].tolist()
            if rows:
                expected[(rows[-1], column) if len(shape) > 1 else rows[-1]] = True
    found = last_rows(torch.zeros(4, 2), index, None if kept is None else mask, 0)
    assert torch.equal(found, expected)


def weighted() -> list[Batch]:
    return [with_attributes(b, 0) for b in batches()]


def test_weights_of_loops_that_there_are() -> None:
    """GCN with weights that a parameter has part in: graphs with loops, with two at a node, without edges or nodes."""
    given = weighted()
    loops = [edges[0][edges[0] == edges[1]] for _, edges, *_ in (b.whole.inputs for b in given)]
    assert any(len(own.unique()) < len(own) for own in loops)
    assert any(not len(own) for own in loops)
    check(made(Weighted), losses, given, quantities=usual())


@pytest.mark.rest
@pytest.mark.parametrize("stay", [False, True])
def test_every_quantity(stay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples and of groups, with rows in order of them and where they are."""
    for module in (of_rows, of_groups) if stay else ():
        monkeypatch.setattr(module, "fits_in_order", lambda places, rows: not places)
    check(made(Weighted), losses, weighted()[1:4])
    check_groups(made(Weighted), losses, [(with_attributes(b, 0), ids, count) for b, ids, count in USERS[1:5]])


class Written(nn.Module):
    """What is computed along edges, written to nodes."""

    def __init__(self, layer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.lin, self.edge, self.head = layer, nn.Linear(4, 4), nn.Linear(8, 4), nn.Linear(4, 3)

    def messages(self, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return torch.sin(self.edge(torch.cat([h[row], h[col]], -1)))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        h = self.layer(self, self.lin(x), edge_index)
        return self.head(h.new_zeros(count, 4).index_add(0, batch, torch.tanh(h)))


def loops(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0]).expand(2, -1)


def some_edges(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    """Several to a node, of which all but one have a derivative alone."""
    row, col = edge_index[:, edge_index[0] <= edge_index[1]]
    return h.index_put((col,), m.messages(h, row, col))


def infinite(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    """What does not stand leaves nothing behind."""
    row, col = edge_index[:, edge_index[0] <= edge_index[1]]
    y = m.messages(h, row, col)
    return h.index_put((col,), y.masked_fill(y < 0.1, -torch.inf)).clamp(min=-3)


def loops_over_edges(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    row, col = torch.cat([edge_index[:, edge_index[0] != edge_index[1]], loops(h)], 1)
    return h.index_put((col,), m.messages(h, row, col))


def edges_over_loops(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    row, col = torch.cat([torch.stack([torch.arange(h.shape[0])] * 2), edge_index], 1)
    return h.scatter(0, col[:, None].expand(-1, 4), m.messages(h, row, col))


def numbers_in_the_code(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    """At the loops, and where they are written to."""
    kept = edge_index[:, edge_index[0] != edge_index[1]]
    row, col = torch.cat([kept, loops(h)], 1)
    y = torch.cat([m.messages(h, *kept), h.new_full((h.shape[0], 4), 0.5)])
    return h * h.new_ones(h.shape[0], 4).index_put((row,), y).index_put((col,), y.flip(1))


def along_the_second_dim(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    row, col = edge_index[:, edge_index[0] <= edge_index[1]]
    y = h.t().clone()
    y[:, col] = m.messages(h, row, col).t()
    return y.t()


def copied(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    """Each row to itself, in place of its own."""
    place = loops(h)[0]
    return h.index_copy(0, place, m.messages(h, place, place)) * h


def one_after_the_other(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    """What was written is read, and written to."""
    same = edge_index[0] == edge_index[1]
    y = h.index_put((edge_index[0][same],), m.messages(h, *edge_index)[same])
    row, col = edge_index[:, ~same]
    return y.index_put((row,), y[col].cos())


WAYS = (some_edges, infinite, loops_over_edges, edges_over_loops, numbers_in_the_code, along_the_second_dim,
        copied, one_after_the_other)  # fmt: skip


@pytest.mark.parametrize("layer", selected(WAYS, {"infinite", "edges_over_loops", "copied"}))
def test_rows_that_are_written(layer: Callable[..., Tensor]) -> None:
    check(made(Written, layer), losses, batches(), quantities=usual())


def from_end_to_end(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    """Edges are of the graph of their first node; the write alone knows the second."""
    row, col = edge_index[:, h[edge_index[0]].sum(-1) > 0]
    return h.index_put((col,), h[row])


def test_an_edge_between_graphs() -> None:
    """Also one that is not picked, and one whose row does not stand."""
    step = psg_fx.transform(made(Written, from_end_to_end), losses, batch_dim=BATCH_DIM, backend="eager",
                            quantities=psg_fx.Norms())  # fmt: skip
    given = graphs([3, 0, 5, 2], [4, 0, 7, 1])
    x, edge_index, *rest = given.whole.inputs
    good = step(given.whole.inputs, given.whole.targets)
    for column in range(edge_index.shape[1]):
        crossing = edge_index.clone()
        crossing[1, column] = 9 if column < 11 else 0
        with pytest.raises(SamplesMixed, match=f"(?s)psg_fx.last_rows.*row {column} of the rows of input_1 is joined"):
            step((x, crossing, *rest), given.whole.targets)
    assert torch.equal(step(given.whole.inputs, given.whole.targets).norms, good.norms)


def by_ids(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    kept = loops(h)[0] > 2
    return h.index_put((edge_index[0][kept[edge_index[0]]],), h[edge_index[1]][kept[edge_index[0]]])


def numbers_of_rows(m: Written, h: Tensor, edge_index: Tensor) -> Tensor:
    row = edge_index[0][edge_index[0] == edge_index[1]]
    return h * torch.ones_like(loops(h)[0]).index_put((row,), loops(h)[0][row])[:, None]


@pytest.mark.parametrize("layer", [by_ids, numbers_of_rows])
def test_numbers_of_rows_neither_pick_nor_are_written(layer: Callable[..., Tensor]) -> None:
    given = graphs([3, 0, 5, 2], [4, 0, 7, 1])
    step = psg_fx.transform(made(Written, layer), losses, batch_dim=BATCH_DIM, backend="eager")
    with pytest.raises((SamplesMixed, NotYetSupported), match=r"test_written_rows\.py"):
        step(given.whole.inputs, given.whole.targets)
