"""Inputs that point (edges) used as numbers: a sample alone numbers its rows otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psg_fx
from psg_fx import Rows, SamplesMixed

Run = Callable[[Any, Tensor, Tensor], Tensor]
IDS, KINDS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]), torch.tensor([3, 0, 1, 1, 2, 0, 3, 2, 1])
EDGES = torch.tensor([[0, 1, 2, 3, 5, 4, 6, 7, 6], [1, 2, 2, 4, 3, 6, 3, 7, 5]])


class Net(nn.Module):
    """`f(model, h, edges)` `[N, 3]` of a linear layer's h; edges have a third row, their kinds."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind, self.run = nn.Linear(4, 3).double(), nn.Embedding(8, 3).double(), run

    def forward(self, x: Tensor, edges: Tensor, ids: Tensor) -> Tensor:
        return self.run(self, self.linear(x), edges)


def loss(h: Tensor, ids: Tensor, count: int) -> Tensor:
    return h.new_zeros(count, 3).index_add(0, ids, h).sin().sum(1)


def answer(run: Run, in_ids: Tensor = IDS, ends: Tensor = EDGES) -> tuple[Any, list[dict[str, Tensor]]]:
    """The step's result, and what a loop over the samples gives."""
    net, nodes = Net(run), Rows("ids")
    x, edges = torch.randn(8, 4, dtype=torch.float64), torch.cat([ends, KINDS[None, : ends.shape[1]]])
    dims = ({"x": nodes, "edges": Rows(None, dim=1), "ids": nodes}, {"ids": nodes, "count": 0})
    step = psg_fx.transform(net, loss, quantities=psg_fx.Grads(), batch_dim=dims, backend="eager")  # type: ignore[arg-type]
    alone = []
    for s in range(3):
        mine = in_ids == s
        own = edges[:, mine[edges[0]]]
        own[:2] = (mine.cumsum(0) - 1)[own[:2]]
        ids = torch.zeros(int(mine.sum()), dtype=torch.int64)
        value = loss(net(x[mine], own, ids), ids, 1).sum()
        grads = torch.autograd.grad(value, [*net.parameters()], allow_unused=True)
        alone.append({k: g for (k, _), g in zip(net.named_parameters(), grads, strict=True) if g is not None})
    return step({"x": x, "edges": edges, "ids": in_ids}, {"ids": in_ids, "count": 3}), alone


def passed(h: Tensor, e: Tensor, weights: Tensor | None = None) -> Tensor:
    """Rows along edges."""
    rows = h[e[0]] if weights is None else h[e[0]] * weights[:, None]
    return torch.zeros_like(h).index_add(0, e[1], rows)


EXACT: dict[str, Run] = {
    "which is first": lambda m, h, e: passed(h, e, e[0] < e[1]),
    "loops": lambda m, h, e: passed(h, e, e[0] == e[1]),
    "how far": lambda m, h, e: passed(h, e, e[0] - e[1]),
    "how far, beyond a number": lambda m, h, e: passed(h, e, (e[1] - e[0]).abs() > 1),
    "kinds beside them": lambda m, h, e: torch.zeros_like(h).index_add(0, e[1], h[e[0]] * m.kind(e[2])),
    "kinds of a part": lambda m, h, e: passed(h, e, e[1:].unbind(0)[1].clamp(max=2)),
    "the later end": lambda m, h, e: torch.zeros_like(h).index_add(0, torch.maximum(e[0], e[1]), h[e[0]]),
    "those that are places": lambda m, h, e: passed(h, torch.stack([e[0].clamp(min=0), e[1]]), e[0] >= 0),
    "either end": lambda m, h, e: torch.zeros_like(h).index_add(0, torch.where(e[2] > 1, e[0], e[1]), h[e[1]]),
    "both ways": lambda m, h, e: passed(h, torch.stack([e[1], e[0]]), e[2]),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_a_sample_alone_has(name: str) -> None:
    out, alone = answer(EXACT[name])
    for s, grads in enumerate(alone):
        for key, value in grads.items():
            torch.testing.assert_close(out.grads[key][s], value)


OTHERS: dict[str, Run] = {
    "odd ones": lambda m, h, e: passed(h, e, e[0] % 2),
    "themselves": lambda m, h, e: passed(h, e, e[0]),
    "themselves, from a part": lambda m, h, e: passed(h, e, e[:2].unbind(0)[1].double()),
    "products": lambda m, h, e: passed(h, e, e[0] * e[1]),
    "sums": lambda m, h, e: passed(h, e, e[0] + e[1]),
    "looked up": lambda m, h, e: torch.zeros_like(h).index_add(0, e[1], h[e[0]] * m.kind(e[0])),
    "looked up in a weight": lambda m, h, e: passed(h, e, m.linear.weight.sum(1)[e[0] % 3]),
    "pointers in halves": lambda m, h, e: passed(h, e) + torch.zeros_like(h).index_add(0, e[0], h[e[1] // 2 * 2]),
    "added up": lambda m, h, e: passed(h, e) * torch.zeros_like(h[:, 0]).index_add(0, e[1], e[0].to(h))[:, None],
    "the first three": lambda m, h, e: passed(h, e, e[0] < 3),
    "edges by their parity": lambda m, h, e: passed(h, e[:, e[0] % 2 == 0]),
    "chosen by a place": lambda m, h, e: torch.zeros_like(h).index_add(
        0, e[1], torch.where((e[0] > 4)[:, None], h[e[0]], h[e[1]])),
    "columns": lambda m, h, e: passed(h, e, e.t()[:, 0] % 2),
    "moved": lambda m, h, e: passed(h, e - 0, e[0] % 2),
    "ends that bits are set in": lambda m, h, e: passed(h, e | 0, e[0] % 2),
    "pairs": lambda m, h, e: passed(h, torch.stack([e[0], e[1]]), e[0] % 2),
    "rounded": lambda m, h, e: passed(h, e.double().round().long(), e[0] % 2),
    "the larger end": lambda m, h, e: passed(h, e[:2].max(0).values.expand(2, -1), e[0] % 2),
    "the largest end and which": lambda m, h, e: passed(h, e, e[:2].max(0).indices),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_lacks(name: str) -> None:
    with pytest.raises(SamplesMixed, match=r"(?s)test_given_pointers.*numbers of rows that an input points to"):
        answer(OTHERS[name])


def test_how_far_they_are_needs_rows_in_order() -> None:
    apart = torch.tensor([0, 1, 0, 1, 0, 2, 1, 1])
    edges = torch.tensor([[0, 2, 4, 1, 6, 5], [2, 4, 0, 3, 7, 5]])
    out, alone = answer(EXACT["which is first"], apart, edges)
    for s, grads in enumerate(alone):
        torch.testing.assert_close(out.grads["linear.weight"][s], grads["linear.weight"])
    with pytest.raises(SamplesMixed, match="comes behind one of a later sample"):
        answer(EXACT["how far"], apart, edges)
