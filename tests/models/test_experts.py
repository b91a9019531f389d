"""Mixtures of experts that sort the tokens of all samples by expert, with every quantity, against single samples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Norms, Rows
from psg_fx.errors import PsgError
from psg_fx.ops.experts import expert_outer, expert_squares
from support.rows_of_samples import Batch, Part, check
from support.selection import one_in, selected

WIDTH, HIDDEN, EXPERTS, CHOICES = 4, 5, 4, 2


def grouped(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Torch's grouped product, which has no float64 on a CPU: there, one expert after the other."""
    if x.dtype is not torch.float64 or torch.compiler.is_exporting():
        return torch._grouped_mm(x, w, offs)
    ends = [0, *offs.tolist()]
    return torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(pairwise(ends))])


def by_histogram(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


def by_bincount(ids: Tensor) -> Tensor:
    return torch.bincount(ids, minlength=EXPERTS)


def by_one_hot(ids: Tensor) -> Tensor:
    return F.one_hot(ids, EXPERTS).sum(0)


def by_comparison(ids: Tensor) -> Tensor:
    return (ids[:, None] == torch.arange(EXPERTS)).sum(0)


def by_adding(ids: Tensor) -> Tensor:
    return torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, ids, torch.ones_like(ids))


class Experts(nn.Module):
    """Two linear layers an expert, with biases; each token goes to its two best experts."""

    def __init__(
        self, count: Callable[[Tensor], Tensor] = by_histogram, width: int = WIDTH, hidden: int = HIDDEN
    ) -> None:
        super().__init__()
        self.count = count
        self.gate, self.head = nn.Linear(width, EXPERTS), nn.Linear(width, 3)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, width, hidden) / width**0.5) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(EXPERTS, hidden))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.gate(flat).softmax(-1).topk(CHOICES, -1)
        return self.head((flat + self.routed(flat, weights, ids)).view(x.shape).mean(1))

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def experts(self, rows: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        """Of rows in the order of their experts."""
        offs = counts.cumsum(0).to(torch.int32)
        h = F.gelu(grouped(rows, self.up, offs) + self.bias[ids])
        return grouped(h, self.down.transpose(1, 2), offs)


class Added(Experts):
    """Put back by adding the rows of each token."""

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ids = ids.flatten()
        order = ids.argsort()
        y = self.experts(flat[order // CHOICES], ids[order], self.count(ids))
        return torch.zeros_like(flat).index_add(0, order // CHOICES, y * weights.flatten()[order, None])


class Inverted(Experts):
    """Put back by the inverse order, and summed over choices."""

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        sorted_ids, order = torch.sort(ids.reshape(-1))
        y = self.experts(flat[order // CHOICES], sorted_ids, self.count(sorted_ids))
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        return self.undone(y, order).unflatten(0, (-1, CHOICES)).sum(1)

    def undone(self, y: Tensor, order: Tensor) -> Tensor:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return y[inverse]


class SortedBack(Inverted):
    """The inverse as the order of the order."""

    def undone(self, y: Tensor, order: Tensor) -> Tensor:
        return y[order.argsort()]


class Written(Inverted):
    """Rows written to where they came from."""

    def undone(self, y: Tensor, order: Tensor) -> Tensor:
        out = torch.zeros_like(y)
        out[order] = y
        return out


class ByTokens(Experts):
    """Numbers of tokens are sorted with the rows; the choice of each is looked up by two indices."""

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        token = torch.arange(flat.shape[0]).unsqueeze(1).expand(-1, CHOICES).reshape(-1)
        order = torch.argsort(ids.flatten(), stable=True)
        own, choice = token[order], order % CHOICES
        y = self.experts(flat[own], ids.flatten()[order], self.count(ids.flatten()))
        y = y * weights[order // CHOICES, choice, None]
        return torch.zeros_like(flat).scatter_add(0, own[:, None].expand(-1, WIDTH), y)


KINDS = [Added, Inverted, SortedBack, Written, ByTokens]


def made(kind: type[Experts], *options: Any) -> Experts:
    torch.manual_seed(0)
    return kind(*options).double()


def batch(size: int, tokens: int = 3, width: int = WIDTH) -> Batch:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, tokens, width, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (size,), generator=generator)
    alone = tuple(Part((x[i : i + 1],), (y[i : i + 1],)) for i in range(size))
    return Batch(Part((x,), (y,)), alone, 0)


def test_every_quantity() -> None:
    step = check(made(Inverted), F.cross_entropy, [batch(5), batch(3), batch(1)])
    assert "expert_mm" in step.explain()


@pytest.mark.parametrize("kind", selected(KINDS, {"Added", "Inverted", "Written"}))
def test_every_way_to_put_rows_back(kind: type[Experts]) -> None:
    check(made(kind), F.cross_entropy, [batch(3)], quantities=[Grads()])


@pytest.mark.slow
@pytest.mark.parametrize("count", one_in(2, [by_bincount, by_one_hot, by_comparison, by_adding]))
def test_experts_counted_otherwise(count: Callable[[Tensor], Tensor]) -> None:
    check(made(Added, count), F.cross_entropy, [batch(3)], quantities=[Grads()])


@pytest.mark.slow
def test_one_token_and_experts_without_rows() -> None:
    model = made(Added)
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0]))
    check(model, F.cross_entropy, [batch(4, 1), batch(1, 1)], quantities=[Grads(), Norms()])


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled() -> None:
    batches = [batch(4), batch(6)]
    check(made(Inverted), F.cross_entropy, batches, backend="inductor", dynamic=True, quantities=[ClippedSum(0.1)])


@pytest.mark.rest  # so do the experts of test_transformers.py, in float32
def test_single_precision() -> None:
    """What torch's own product computes, in its dtype."""
    model = made(Added, by_histogram, 8, 16).float()  # torch wants rows of 16 bytes
    given = batch(4, 3, 8).whole
    x, y = given.inputs[0].float(), given.targets[0]
    out = psg_fx.transform(model, F.cross_entropy, quantities=Norms(), backend="eager")(x, y)
    losses = F.cross_entropy(model(x), y, reduction="none")
    for i, loss in enumerate(losses):
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        norm = torch.cat([g.flatten() for g in found]).norm()
        torch.testing.assert_close(out.norms[i], norm, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_of_each_expert_alone() -> None:
    """Where matrices are wide, no product runs over the rows of other experts, and directions are pushed through."""
    asked = [Norms(), ClippedSum(0.1), Dots()]
    step = check(made(Added, by_histogram, 64, 48), F.cross_entropy, [batch(3, 32, 64)], quantities=asked)
    plan = step.explain(wide=True)
    assert "segment-matmul" in plan
    assert "segment-linear" in plan


@pytest.mark.parametrize("ids", [[0, 0, 2, 2, 4], [2, 0, 4, 2, 0], [-1, 0, 2, 4, 5], [0, 5, -1, 4, 2], [], [1]])
@pytest.mark.parametrize(("dtype", "inputs"), [(torch.float32, 8), (torch.float32, 3), (torch.float64, 8)])
def test_products_of_rows(ids: list[int], dtype: torch.dtype, inputs: int) -> None:
    """Rows in order of their experts or not, rows of none, of lengths that torch multiplies at once or does not."""
    x, y, of = torch.randn(len(ids), inputs, dtype=dtype), torch.randn(len(ids), 4, dtype=dtype), torch.tensor(ids)
    each = x.unsqueeze(2) * y.unsqueeze(1)
    expected = torch.stack([each[of == expert].sum(0) for expert in range(5)])
    torch.testing.assert_close(expert_outer(x, y, of.to(torch.int64), 5), expected)


@pytest.mark.parametrize("inputs", [3, 30])
@pytest.mark.parametrize("rows", [0, 1, 40, 200])
@pytest.mark.parametrize("spread", [1, 3, 100])
def test_squares_of_products(rows: int, inputs: int, spread: int) -> None:
    """By Gram matrices of experts with about as many rows, or of the product: what is least; ids of no expert too."""
    x, y = torch.randn(rows, inputs, dtype=torch.float64), torch.randn(rows, inputs + 5, dtype=torch.float64)
    ids = 4 - (6 * torch.rand(rows) ** spread).long()  # the larger the spread, the more have the last expert
    ids[::7] = 5
    expected = expert_outer(x, y, ids, 5).square().sum((1, 2))
    torch.testing.assert_close(expert_squares(x, y, ids, 5), expected)


@pytest.mark.slow
def test_users_and_parts() -> None:
    """Groups of samples, and fewer samples at a time."""
    model, given = made(Added), batch(6)
    x, y = given.whole.inputs[0], given.whole.targets[0]
    step = psg_fx.transform(model, F.cross_entropy, quantities=Grads(), backend="eager")
    alone, ids = step(x, y).grads, torch.tensor([1, 0, 1, 2, 2, 1])
    of_users, parts = step(x, y, groups=ids).grads, psg_fx.microbatch(step, 4)(x, y).grads
    for name, g in alone.items():
        expected = torch.zeros(3, *g.shape[1:], dtype=g.dtype).index_add(0, ids, g)
        torch.testing.assert_close(of_users[name], expected)
        torch.testing.assert_close(parts[name], g)


class OfNodes(Added):
    """Experts for the nodes of graphs, whose number is another for each sample."""

    def forward(self, x: Tensor, batch: Tensor, count: int) -> Tensor:  # type: ignore[override]
        weights, ids = self.gate(x).softmax(-1).topk(CHOICES, -1)
        h = x + self.routed(x, weights, ids)
        return self.head(h.new_zeros(count, WIDTH).index_add(0, batch, h))


def of_nodes(sizes: list[int]) -> Batch:
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    x = torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.arange(len(sizes)) % 3
    alone = [Part((x[ids == s], torch.zeros(n, dtype=torch.int64), 1), (y[s : s + 1],)) for s, n in enumerate(sizes)]
    row = Rows("batch")
    return Batch(Part((x, ids, len(sizes)), (y,)), tuple(alone), ((row, row, 0), 0))


@pytest.mark.slow
def test_experts_of_rows_of_samples() -> None:
    sizes = [of_nodes([3, 0, 4, 1]), of_nodes([2, 5])]
    check(made(OfNodes), F.cross_entropy, sizes, quantities=[Grads(), Norms(), ClippedSum(0.1)])


class Between(Added):
    """An op that joins neighbours in the order of experts: tokens of any two samples."""

    def experts(self, rows: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        y = super().experts(rows, ids, counts)
        return y + y.cumsum(0)


class OtherCounts(Added):
    """Experts end where those of other ids do."""

    def experts(self, rows: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        return super().experts(rows, ids, counts.flip(0))


class Twice(Added):
    """Each count is too large."""

    def experts(self, rows: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        return super().experts(rows, ids, counts.clamp(max=2))


class Descending(Added):
    """Sorted the other way round than the ends say."""

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ids = ids.flatten()
        order = ids.argsort(descending=True)
        y = self.experts(flat[order // CHOICES], ids[order], self.count(ids))
        return torch.zeros_like(flat).index_add(0, order // CHOICES, y * weights.flatten()[order, None])


class WrongPlace(Added):
    """Rows are added to other tokens than theirs."""

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ids = ids.flatten()
        order = ids.argsort()
        y = self.experts(flat[order // CHOICES], ids[order], self.count(ids))
        return torch.zeros_like(flat).index_add(0, torch.arange(len(order)) // CHOICES, y)


class KeptInOrder(Added):
    """Rows that are never put back."""

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ids = ids.flatten()
        order = ids.argsort()
        y = self.experts(flat[order // CHOICES], ids[order], self.count(ids))
        return y.view(-1, CHOICES, WIDTH).sum(1)


class Capacity(Added):
    """Experts take so many rows of the batch, and drop others."""

    def routed(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ids = ids.flatten()
        order = ids.argsort()
        y = self.experts(flat[order // CHOICES], ids[order], self.count(ids))
        place = F.one_hot(ids[order], EXPERTS).cumsum(0).gather(1, ids[order, None])
        y = torch.where(place <= 3, y, 0.0)
        return torch.zeros_like(flat).index_add(0, order // CHOICES, y)


@pytest.mark.parametrize("kind", [Between, OtherCounts, Twice, Descending, WrongPlace, KeptInOrder, Capacity])
def test_what_joins_rows_is_refused(kind: type[Experts]) -> None:
    step = psg_fx.transform(made(kind), F.cross_entropy, quantities=Norms(), backend="eager")
    given = batch(3).whole
    with pytest.raises(PsgError):
        step(given.inputs[0], given.targets[0])
