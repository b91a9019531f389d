"""What one sample alone lacks: the rows of others in masks and pointers made of ids, and the number of all rows."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import NotYetSupported, PsgError, Rows, SamplesMixed

Rowwise = Callable[[Any, Tensor, Tensor], Tensor]
IDS = torch.tensor([0, 1, 1, 1, 1, 2, 2])


class Pooled(nn.Module):
    """`f(model, x, ids)` `[R, 4]`, summed for each sample."""

    def __init__(self, run: Rowwise) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight, self.run = nn.Linear(4, 4).double(), nn.Parameter(torch.rand(4).double()), run

    def forward(self, x: Tensor, ids: Tensor, count: int) -> Tensor:
        return x.new_zeros(count, 4).index_add(0, ids, self.run(self, x, ids))


def loss(out: Tensor, y: Tensor) -> Tensor:
    return out.sum(1) * y


def same(ids: Tensor) -> Tensor:
    return ids[:, None] == ids[None, :]


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def attended(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], model.linear(x)[None], attn_mask=mask[None])[0]


def diagonal(x: Tensor) -> Tensor:
    return torch.eye(x.shape[0], dtype=torch.bool)


def first(x: Tensor, ids: Tensor) -> Tensor:
    """Where the first row of each row's sample is."""
    return torch.full((3,), 10**6).scatter_reduce(0, ids, places(x), "amin")[ids]


def causal(x: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return places(x).to(dtype)[:, None] >= places(x).to(dtype)[None, :]


def alike_in(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    return of(places(x))[:, None] == of(places(x))[None, :]


def weighed(model: Any, x: Tensor, weights: Tensor) -> Tensor:
    return weights @ model.linear(x)


def roots(model: Any, x: Tensor) -> Tensor:
    return ((x * model.weight.square()) @ x.t()).sqrt()


def answer(
    run: Rowwise, x: Tensor, ids: Tensor, kind: type[Pooled] = Pooled
) -> tuple[Any, Tensor, list[dict[str, Tensor]]]:  # fmt: skip
    """The step's result; and what a loop over the samples gives."""
    model, count = kind(run), int(ids.max()) + 1
    axis = Rows(1)
    step = psg_fx.transform(
        model, loss, batch_dim=((axis, axis, 0), 0), quantities=psg_fx.Grads(), backend="eager"
    )  # fmt: skip
    out = step((x, ids, count), torch.ones(count, dtype=torch.float64))
    losses = [model(x[ids == b], torch.zeros_like(ids[ids == b]), 1).sum() for b in range(count)]
    named = dict(model.named_parameters())
    grads = [torch.autograd.grad(value, [*named.values()], allow_unused=True) for value in losses]
    return out, torch.stack(losses), [dict(zip(named, g, strict=True)) for g in grads]


EXACT: dict[str, Rowwise] = {
    "causal": lambda m, x, i: attended(m, x, same(i) & causal(x)),
    "causal, in floats, one row further": lambda m, x, i: attended(m, x, same(i) & causal(x, torch.float32).triu(-1)),
    "by the distance of numbers of samples": lambda m, x, i: attended(
        m, x, ((i[:, None] - i[None, :]).abs() < 1) & torch.where(same(i), causal(x), same(i))
    ),
    "the row before, by distance": lambda m, x, i: attended(
        m, x, same(i) & ((places(x)[:, None] - places(x)[None, :]) % 3 < 2)
    ),
    "roots of what is masked before": lambda m, x, i: weighed(
        m, x, ((x * m.weight.square()) @ x.t()).masked_fill(~same(i), 1.0).sqrt() * same(i)
    ),
    "quotients of what is masked before": lambda m, x, i: weighed(
        m, x, m.linear(x) @ x.t() / (x @ x.t()).masked_fill(~same(i), 1.0) * same(i)
    ),
    "quotients by rows and numbers": lambda m, x, i: weighed(
        m, x, ((m.linear(x) @ x.t()) / x.norm(dim=-1, keepdim=True) / 3).tanh() * same(i)
    ),
    "over all rows of a sample": lambda m, x, i: m.linear(x).sin() / same(i).sum(-1, keepdim=True),
    "over those before": lambda m, x, i: m.linear(x).sin() / (same(i) & causal(x)).int().sum(0)[:, None],
    "over the square of all": lambda m, x, i: m.linear(x).sin() / (same(i).int() * same(i).int()).sum(1)[:, None],
    "over twice of all, by numbers": lambda m, x, i: m.linear(x).sin() / (same(i).int() * 2 & 3).sum(1)[:, None],
    "of masks with one truth": lambda m, x, i: m.linear(x) * ((same(i) & True) | False).any(1, keepdim=True),
    "of rows that have others": lambda m, x, i: m.linear(x) * (same(i) & ~diagonal(x)).any(-1, keepdim=True),
    "of rows without earlier ones": lambda m, x, i: m.linear(x).masked_fill(
        ~((i[:, None] != i[None]) | ~causal(x) | diagonal(x)).all(-1, keepdim=True), 2.0
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_a_sample_alone_has(name: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(len(IDS), 4, dtype=torch.float64)
    if "roots" in name:
        x = x.abs() * torch.where(IDS % 2 == 0, 1, -1)[:, None]
    out, losses, grads = answer(EXACT[name], x, IDS)
    torch.testing.assert_close(out.losses, losses)
    for b, own in enumerate(grads):
        for key, value in own.items():
            if key in out.grads and value is not None:
                torch.testing.assert_close(out.grads[key][b], value)


SUMMED: dict[str, Callable[[Tensor, int, Tensor], Tensor]] = {
    "a product": lambda i, count, h: (i[None] == torch.arange(count)[:, None]).double() @ h,
    "a batched product": lambda i, count, h: torch.bmm((i == torch.arange(count)[:, None]).double()[None], h[None])[0],
    "one_hot": lambda i, count, h: torch.mm(F.one_hot(i, count).double().t(), h),
    "means": lambda i, count, h: (a := F.one_hot(i, count).double().t()) @ h / a.sum(1, keepdim=True),
    "means by weights": lambda i, count, h: ((a := F.one_hot(i, count).t()) / a.sum(1)[:, None]).double() @ h,
}


@pytest.mark.parametrize("name", SUMMED)
def test_rows_are_summed_by_products_with_a_mask(name: str) -> None:
    class Summed(Pooled):
        def forward(self, x: Tensor, ids: Tensor, count: int) -> Tensor:
            return SUMMED[name](ids, count, self.linear(x).sin())

    x, ids = torch.rand(len(IDS), 4, dtype=torch.float64), IDS.roll(2)
    out, losses, grads = answer(roots, x, ids, Summed)
    torch.testing.assert_close(out.losses, losses)
    for b, own in enumerate(grads):
        torch.testing.assert_close(out.grads["linear.weight"][b], own["linear.weight"])


class Mean(Pooled):
    """Divided by the number of rows, which is counted by ones of the code."""

    def ones(self, ids: Tensor) -> Tensor:
        return torch.ones(ids.shape[0], dtype=torch.int64)

    def forward(self, x: Tensor, ids: Tensor, count: int) -> Tensor:
        rows = torch.zeros(count, dtype=torch.int64).index_add(0, ids, self.ones(ids))
        h = self.run(self, x, ids) / rows[ids][:, None]
        return x.new_zeros(count, 4).index_add(0, ids, h) / rows.clamp(min=1)[:, None]


class MeanByOnesLikeIds(Mean):
    def ones(self, ids: Tensor) -> Tensor:
        return torch.ones_like(ids)


@pytest.mark.parametrize("kind", [Mean, MeanByOnesLikeIds])
def test_counts_of_rows_are_what_a_sample_alone_has(kind: type[Mean]) -> None:
    x, ids = torch.rand(len(IDS), 4, dtype=torch.float64), IDS.flip(0)
    out, losses, grads = answer(lambda m, x, i: m.linear(x).sin(), x, ids, kind)
    torch.testing.assert_close(out.losses, losses)
    for b, own in enumerate(grads):
        torch.testing.assert_close(out.grads["linear.weight"][b], own["linear.weight"])


OTHERS: dict[str, tuple[Rowwise, type[PsgError], str]] = {
    "numbers of samples": (
        lambda m, x, i: weighed(m, x, (x @ x.t()) * (same(i) * (1 + i)[:, None])),
        NotYetSupported, "mul .*sample alone"),
    "odd samples": (
        lambda m, x, i: attended(m, x, same(i) & ((i % 2 == 0)[:, None] | causal(x))), NotYetSupported, "sample alone"),
    "even places": (
        lambda m, x, i: attended(m, x, same(i) & ((places(x) % 2 == 0)[None] | diagonal(x))),
        NotYetSupported, "sample alone"),
    "half of all rows": (
        lambda m, x, i: attended(
            m, x, same(i) & ((2 * places(x) < x.shape[0])[None] | diagonal(x))),
        NotYetSupported, "sample alone"),
    "the first nine places": (
        lambda m, x, i: attended(m, x, same(i) & ((places(x) < 9)[None] | diagonal(x))),
        NotYetSupported, "sample alone"),
    "the first four samples": (
        lambda m, x, i: attended(m, x, same(i) & ((i < 4)[:, None] | diagonal(x))), NotYetSupported, "sample alone"),
    "chunks that no small batch shows": (
        lambda m, x, i: attended(m, x, same(i) & alike_in(x, lambda p: p // 300)), NotYetSupported, "floor_divide"),
    "chunks by shifts": (
        lambda m, x, i: attended(m, x, same(i) & alike_in(x, lambda p: p >> 4)), NotYetSupported, "rshift"),
    "places that are rounded": (
        lambda m, x, i: attended(m, x, same(i) & causal(x, torch.bfloat16)),
        NotYetSupported, "sample alone: aten._to_copy"),
    "powers of places": (
        lambda m, x, i: attended(m, x, same(i) & ((2.0 ** places(x) < 1e6)[None] | diagonal(x))),
        NotYetSupported, "sample alone: aten.pow"),
    "products of numbers of samples": (
        lambda m, x, i: attended(m, x, same(i) & ((i * i < 300)[None] | diagonal(x))), NotYetSupported, "mul "),
    "places from the first one of a sample on": (
        lambda m, x, i: m.linear(x) * x[torch.maximum(first(x, i), places(x) // 2)], NotYetSupported, "sample alone"),
    "over the rows of others": (
        lambda m, x, i: m.linear(x) / (~same(i)).sum(-1, keepdim=True), SamplesMixed, "%sum_1, which numbers"),
    "over rows of its sample or before": (
        lambda m, x, i: m.linear(x) / (same(i) | causal(x)).sum(-1)[:, None], SamplesMixed, "%sum_1, which numbers"),
    "over all rows before": (
        lambda m, x, i: m.linear(x) / causal(x).sum(-1, keepdim=True), SamplesMixed, "%sum_1, which numbers"),
    "whether all are its own": (
        lambda m, x, i: m.linear(x) * same(i).all(-1, keepdim=True), SamplesMixed, "%all_1, which numbers"),
    "over what is no mask": (
        lambda m, x, i: m.linear(x) / (~same(i).int()).sum(-1, keepdim=True), SamplesMixed, "%sum_1, which numbers"),
    "over a mask or true": (
        lambda m, x, i: m.linear(x) / (same(i) | True).sum(1)[:, None], SamplesMixed, "which numbers samples or rows"),
    "over a mask or true, in place": (
        lambda m, x, i: m.linear(x) / operator.ior(same(i), True).sum(1)[:, None],
        SamplesMixed, "which numbers samples or rows"),
    "over a mask or one": (
        lambda m, x, i: m.linear(x) / (same(i).int() | 1).sum(1)[:, None],
        SamplesMixed, "which numbers samples or rows"),
    "whether there is a mask or two": (
        lambda m, x, i: m.linear(x) * torch.bitwise_or(same(i).long(), 2).any(1)[:, None],
        SamplesMixed, "which numbers samples or rows"),
    "whether all are of others, times zero, or its own": (
        lambda m, x, i: m.linear(x) * ((~same(i)).int() * 0 | same(i).int()).all(1)[:, None],
        SamplesMixed, "which numbers samples or rows"),
    "whether all are of others, doubled, and theirs, or its own": (
        lambda m, x, i: m.linear(x) * (((~same(i)).int() * 2 & (~same(i)).int()) | same(i).int()).all(1)[:, None],
        SamplesMixed, "which numbers samples or rows"),
    "over masks of neighbours that are repeated": (
        lambda m, x, i: m.linear(x) * (i == i.roll(1))[:, None].expand(-1, x.shape[0]).any(1, keepdim=True),
        SamplesMixed, "%any_1, which numbers"),
    "summed over the rows before": (
        lambda m, x, i: weighed(m, x, causal(x).double()), SamplesMixed, "matmul mixes samples in this batch"),
    "all summed by a mask of rows": (
        lambda m, x, i: x * ((i < 9).double() @ m.linear(x)), SamplesMixed, "matmul mixes samples"),
    "summed by numbers of samples": (
        lambda m, x, i: weighed(m, x, (same(i) * i).double()), NotYetSupported, "sample alone: aten.mul"),
    "a pointer of odd samples": (
        lambda m, x, i: m.linear(x) * x[torch.where((i == i.roll(1)) & (i % 2 == 1), places(x) - 1, places(x))],
        NotYetSupported, "aten.index .*sample alone"),
    "a weight's rows": (
        lambda m, x, i: m.weight.expand(3, 4)[i * 0] * x, SamplesMixed, "aten.index"),
    "rolled by their number": (
        lambda m, x, i: m.linear(x) * torch.arange(4.0).roll(x.shape[0], 0), SamplesMixed, "roll .*number of rows"),
    "triangles by their number": (
        lambda m, x, i: m.linear(x) * torch.ones(4, 4).tril(x.shape[0] - 6)[0], SamplesMixed, "tril .*number of rows"),
    "from their number on": (
        lambda m, x, i: m.linear(x) * torch.arange(x.shape[0], x.shape[0] + 4), SamplesMixed, "arange .*of rows"),
    "drawn below their number": (
        lambda m, x, i: m.linear(x) * torch.randint(0, x.shape[0], (4,)), SamplesMixed, "randint .*number of rows"),
    "roots, masked": (
        lambda m, x, i: weighed(m, x, roots(m, x) * same(i)), NotYetSupported, "sqrt .*be no number"),
    "roots, chosen": (
        lambda m, x, i: weighed(m, x, torch.where(same(i), roots(m, x), 0.0)), NotYetSupported, "sqrt .*be no number"),
    "powers, masked": (
        lambda m, x, i: weighed(m, x, ((x @ x.t()) ** -1) * same(i)), NotYetSupported, "pow .*be no number"),
    "roots, masked by their values": (
        lambda m, x, i: weighed(m, x, (s := (x * m.weight) @ x.t()).masked_fill(s > 100, 1.0).sqrt() * same(i)),
        NotYetSupported, "sqrt .*be no number"),
    "quotients, masked": (
        lambda m, x, i: weighed(m, x, (1 / (x @ x.t())) * same(i)), NotYetSupported, "reciprocal .*be no number"),
    "quotients of two": (
        lambda m, x, i: weighed(m, x, (x @ m.linear(x).t() / (x @ x.t())).masked_fill(~same(i), 0.0)),
        NotYetSupported, "div .*be no number"),
    "a function that is no number of some": (
        lambda m, x, i: weighed(m, x, torch.hypot(x @ x.t(), x @ m.linear(x).t()) * same(i)),
        NotYetSupported, "hypot .*be no number"),
    "roots, filled": (
        lambda m, x, i: weighed(m, x, roots(m, x).masked_fill(~same(i), -torch.inf).softmax(-1)),
        NotYetSupported, "sqrt .*be no number"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_lacks(name: str) -> None:
    run, kind, words = OTHERS[name]
    with pytest.raises(kind, match=f"(?s){words}"):
        answer(run, torch.rand(len(IDS), 4, dtype=torch.float64), IDS)


@pytest.mark.parametrize(("lowered", "reach"), [(False, 2), (True, 2), (False, 300)])
def test_places_of_rows_that_lie_apart(lowered: bool, reach: int) -> None:
    """What goes by how far rows are from one another needs them in the order of their samples; what goes by which comes
    first does not.
    """

    def near(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        far = (places(x)[:, None] - places(x)[None, :]).abs()
        lower = torch.where(same(ids), -0.5 * far, -torch.inf).to(x.dtype)
        return attended(m, x, lower if lowered else same(ids) & (far < reach))

    x, apart = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 2, 1, 0, 1])
    out, losses, _ = answer(near, x, IDS)
    torch.testing.assert_close(out.losses, losses)
    with pytest.raises(SamplesMixed, match="comes behind one of a later sample"):
        answer(near, x, apart)
    out, losses, _ = answer(EXACT["causal"], x, apart)
    torch.testing.assert_close(out.losses, losses)


def test_an_edge_between_nodes_that_start_alike() -> None:
    """Losses do not tell it, gradients would: the edge is refused."""

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, source: Tensor, target: Tensor, ids: Tensor, count: int) -> Tensor:
            nodes = self.linear(torch.ones(x.shape[0], 4))
            received = x.new_zeros(x.shape[0], 4).index_add(0, target, nodes[source])
            return x.new_zeros(count, 4).index_add(0, ids, received * x)

    nodes, edges = Rows(3), Rows(None)
    step = psg_fx.transform(
        Alike(), loss, batch_dim=((nodes, edges, edges, nodes, 0), 0), quantities=psg_fx.Norms(), backend="eager"
    )  # fmt: skip
    ids, target, x = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([1, 0, 3, 4]), torch.rand(6, 4)
    step((x, torch.tensor([0, 1, 2, 3]), target, ids, 3), torch.ones(3))
    with pytest.raises(SamplesMixed):
        step((x, torch.tensor([2, 1, 2, 3]), target, ids, 3), torch.ones(3))


def test_ids_of_what_data_point_to() -> None:
    """Pairs are pooled by the ids of the rows that they point to: that is for their own sample, whatever they are."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, pairs: Tensor, ids: Tensor, count: int) -> Tensor:
            i, j = pairs
            return x.new_zeros(count, 4).index_add(0, ids[i], self.linear(x[i] * x[j]))

    model, nodes = Pairs(), Rows(2)
    step = psg_fx.transform(
        model, loss, batch_dim=((nodes, Rows(None, 1), nodes, 0), 0), quantities=psg_fx.Norms(), backend="eager"
    )  # fmt: skip
    x, pairs, ids = torch.rand(6, 4), torch.tensor([[0, 1, 3, 5], [1, 0, 4, 5]]), torch.tensor([0, 0, 1, 1, 1, 2])
    losses = step((x, pairs, ids, 3), torch.ones(3)).losses
    torch.testing.assert_close(losses, model(x, pairs, ids, 3).sum(1))


OF_OFFSETS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "over the length": lambda h, x, o, i: h / (o[1:] - o[:-1])[i].unsqueeze(1),
    "times the row before": lambda h, x, o, i: h * x[torch.maximum(places(x) - 1, o[:-1][i])],
    "times the row behind": lambda h, x, o, i: h * x[torch.minimum(places(x) + 1, o[1:][i] - 1)],
}


@pytest.mark.parametrize("behind", [{"right": True}, {"side": "right"}])
@pytest.mark.parametrize("name", OF_OFFSETS)
def test_rows_with_offsets_are_in_order(name: str, behind: dict[str, Any]) -> None:
    class Summed(Pooled):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            ids = torch.searchsorted(offsets[1:].contiguous(), places(x), **behind)
            h = OF_OFFSETS[name](self.linear(x).sin(), x, offsets, ids)
            return x.new_zeros(offsets.shape[0] - 1, 4).index_add(0, ids, h)

    model, x = Summed(roots), torch.rand(7, 4, dtype=torch.float64)
    ends = [0, 1, 5, 7]
    step = psg_fx.transform(
        model, loss, batch_dim=((Rows.from_offsets(1), None), 0), quantities=psg_fx.Grads(), backend="eager"
    )  # fmt: skip
    out = step((x, torch.tensor(ends)), torch.ones(3, dtype=torch.float64))
    for b, (begin, end) in enumerate(itertools.pairwise(ends)):
        value = model(x[begin:end], torch.tensor([0, end - begin])).sum()
        torch.testing.assert_close(out.losses[b], value)
        (grad,) = torch.autograd.grad(value, [model.linear.weight])
        torch.testing.assert_close(out.grads["linear.weight"][b], grad)
