"""What mixes samples that are rows is refused: where shapes show it, at capture; where values do, at the call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx import Rows
from psg_fx.errors import BadArgument, NotYetSupported, PsgError, SamplesMixed
from support.graphs_of_nodes import BATCH_DIM, EDGES, OneLayer, graphs, losses, made
from support.rows_of_samples import Batch, RowsTruth, check
from support.selection import one_in


def step(model: nn.Module, loss: Any = losses, batch_dim: Any = BATCH_DIM, **options: Any) -> Any:
    return psg_fx.transform(model, loss, batch_dim=batch_dim, quantities=psg_fx.Norms(), backend="eager", **options)


def batch() -> Batch:
    return graphs([3, 0, 5, 2], [4, 0, 7, 1])


def call(made: Any, given: Batch, **changes: Any) -> Any:
    inputs = dict(zip(("x", "edge_index", "batch", "count"), given.whole.inputs, strict=True)) | changes
    return made(tuple(inputs.values()), given.whole.targets)


def edge_index(row: int, column: int, value: int) -> Tensor:
    found = batch().whole.inputs[1].clone()
    found[row, column] = value
    return found


@functools.cache
def served() -> Any:
    """A step that has answered a call, for tests of batches that come later."""
    found = step(made(OneLayer))
    call(found, batch())
    return found


of_one_step = pytest.mark.xdist_group("mixing of rows")


@of_one_step
@pytest.mark.parametrize(("end", "words"), [(0, "aten.index mixes"), (1, "aten.index_add mixes")])
def test_an_edge_between_graphs(end: int, words: str) -> None:
    """The edge, its op and its line are named; nothing is returned, and the step serves the next batch."""
    made_step, given = served(), batch()
    good = call(made_step, given)
    for column, value in ((2, 9), (0, 3), (11, 0)):
        with pytest.raises(SamplesMixed, match=rf"graphs_of_nodes.py(.|\n)*row {column} of the rows of input_1"):
            call(made_step, given, edge_index=edge_index(end, column, value))
    assert torch.equal(call(made_step, given).norms, good.norms)
    assert len(made_step.captures) == 1
    assert words


def test_an_edge_between_graphs_at_the_first_call() -> None:
    with pytest.raises(SamplesMixed, match="row 5 of the rows of input_1 is joined with one of the rows of input_0"):
        call(step(made(OneLayer)), batch(), edge_index=edge_index(1, 5, 1))


@of_one_step
def test_edges_whose_ids_are_given() -> None:
    """Then both ends are checked against them."""
    ends = Rows(lambda x, edge_index, batch, count: batch[edge_index[1]], dim=1)
    made_step = step(made(OneLayer), batch_dim=((Rows("batch"), ends, Rows("batch"), 0), 0))
    expected = call(served(), batch()).norms
    torch.testing.assert_close(call(made_step, batch()).norms, expected)
    with pytest.raises(SamplesMixed, match="row 2 of the rows of input_1"):
        call(made_step, batch(), edge_index=edge_index(0, 2, 9))
    assert "checked at every call: aten.index:" in made_step.explain()


@of_one_step
@pytest.mark.parametrize(
    ("value", "first"),
    [(-1, False), (4, False), (10**9, False), pytest.param(-1, True, id="first", marks=pytest.mark.rest)],
)
def test_ids_out_of_range(value: int, first: bool) -> None:
    made_step, ids = step(made(OneLayer)) if first else served(), batch().whole.inputs[2].clone()
    ids[3] = value
    with pytest.raises(BadArgument, match=r"row 3 of the rows of input_0, input_2 belongs to no sample"):
        call(made_step, batch(), batch=ids)


@of_one_step
@pytest.mark.parametrize(
    ("value", "first"),
    [(-11, False), (10, False), (10**9, False), pytest.param(10, True, id="first", marks=pytest.mark.rest)],
)
def test_edges_to_no_node(value: int, first: bool) -> None:
    made_step = step(made(OneLayer)) if first else served()
    with pytest.raises(SamplesMixed, match="row 6 of the rows of input_1"):
        call(made_step, batch(), edge_index=edge_index(0, 6, value))


class Mixes(nn.Module):
    """Between a layer and the sum over each graph, something that may mix nodes."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.between, self.layer, self.norm = between, nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        h = self.between(self, self.layer(x), edge_index, batch)
        return h.new_zeros(count, 4).index_add(0, batch, h)


MIXING: dict[str, Callable[..., Tensor]] = {
    "batch-norm": lambda m, h, e, b: m.norm(h),
    "softmax-over-nodes": lambda m, h, e, b: h.softmax(0),
    "less-the-mean": lambda m, h, e, b: h - h.mean(0),
    "share-of-all": lambda m, h, e, b: h / h.sum(),
    "number-of-nodes": lambda m, h, e, b: h / h.shape[0],
    "number-of-edges": lambda m, h, e, b: h * e.shape[1],
    "cumsum": lambda m, h, e, b: h.cumsum(0),
    "flip": lambda m, h, e, b: h.flip(0),
    "first-node": lambda m, h, e, b: h - h[0],
    "fixed-nodes": lambda m, h, e, b: h + h[torch.tensor([0])],
    "products-of-all": lambda m, h, e, b: h @ (h.T @ h),
    "ids-as-values": lambda m, h, e, b: h * b[:, None],
    "ids-in-a-branch": lambda m, h, e, b: torch.where(b[:, None] == 0, h, -h),
    "row-numbers-as-values": lambda m, h, e, b: h * torch.arange(h.shape[0])[:, None],
    "attention-to-all": lambda m, h, e, b: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "causal-attention": lambda m, h, e, b: F.scaled_dot_product_attention(h[None], h[None], h[None], is_causal=True)[0],
    "sorted": lambda m, h, e, b: h.sort(0).values,
    "first-rows": lambda m, h, e, b: torch.cat([h[:1], h[1:]]),
    "edges-beside-nodes": lambda m, h, e, b: torch.cat([h, h[e[0]]])[: h.shape[0]],
    "shift": lambda m, h, e, b: h.roll(1, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(2, MIXING))  # tests/independence has each op, samples apart
def test_what_mixes_nodes_is_refused(name: str) -> None:
    model = Mixes(MIXING[name]).double().train()
    with pytest.raises((SamplesMixed, NotYetSupported), match=r"test_mixing_of_rows\.py|graphs_of_nodes\.py"):
        call(step(model), batch())


def test_batch_norm_with_running_statistics_is_not() -> None:
    check(Mixes(MIXING["batch-norm"]).double().eval(), losses, [batch()], quantities=[psg_fx.Grads(), psg_fx.Norms()])


REFUSED_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean-over-nodes": lambda out, y: out.square().mean(),
    "sum-of-nodes": lambda out, y: out.sum() + y.sum(),
    "per-node": lambda out, y: out.sum(1),
}  # fmt: skip


class OfNodes(nn.Module):
    """A value for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_losses_that_are_not_of_samples(name: str) -> None:
    with pytest.raises((SamplesMixed, BadArgument)):
        call(step(OfNodes().double(), REFUSED_LOSSES[name]), batch())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"batch_dim": ((Rows("nodes"), EDGES, Rows("batch"), 0), 0)}, "there is no input 'nodes'"),
        ({"batch_dim": ((Rows("batch"), Rows("batch", 1), Rows("batch"), 0), 0)}, "different numbers of rows"),
        ({"batch_dim": ((Rows(0), EDGES, Rows("batch"), 0), 0)}, "input_0 is no number of a sample for each row"),
        ({"batch_dim": ((Rows("batch", 2), EDGES, Rows("batch"), 0), 0)}, "input_0 has no dim 2"),
        ({"memory_budget": 0.5}, "memory_budget with rows of samples"),
    ],
)
def test_mistakes(kind: dict[str, Any], words: str) -> None:
    with pytest.raises(PsgError, match=words):
        call(step(made(OneLayer), **kind), batch())


def test_numbers_of_samples() -> None:
    """An int whose batch_dim is 0, the targets and num_samples= must agree."""
    made_step, given = step(made(OneLayer)), batch()
    with pytest.raises(BadArgument, match="the number of samples is 5 and 4"):
        call(made_step, given, count=5)
    with pytest.raises(BadArgument, match="the number of samples is 4 and 7"):
        made_step(given.whole.inputs, given.whole.targets, num_samples=7)
    with pytest.raises(BadArgument, match="num_samples is given without rows"):
        psg_fx.transform(nn.Linear(2, 1), losses, backend="eager")(torch.zeros(2, 2), torch.zeros(2), num_samples=2)


def test_without_a_loss() -> None:
    with pytest.raises(NotYetSupported, match="rows of samples without a loss"):
        psg_fx.transform(made(OneLayer), batch_dim=BATCH_DIM[0], backend="eager")(*batch().whole.inputs)


@pytest.mark.parametrize("wrong", [("a", 0.5), (True, 0), (None, True), (1.5, 0)])
def test_what_rows_may_be(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(BadArgument, match="is no"):
        Rows(*wrong)


@of_one_step
def test_what_is_said() -> None:
    said = served().explain()
    assert "by definition: rows of input_1 belong to the sample" in said
    assert "proven: rows of input_0, input_2 point to their own sample by their ids" in said
    assert "checked at every call: aten.index_add: rows of input_1 point to rows of input_0, input_2" in said


def test_parts_of_a_batch() -> None:
    given = batch().whole
    with pytest.raises(NotYetSupported, match="parts of rows of samples"):
        psg_fx.microbatch(step(made(OneLayer)), 2)(given.inputs, given.targets)


def test_a_store_that_has_a_part_of_a_batch(tmp_path: Path) -> None:
    """The rows of a graph that is in the store would be those of one that is not, where that has none."""
    one, two = graphs([3], [2]).whole, graphs([3, 0], [2, 0]).whole
    made_step = psg_fx.transform(
        made(OneLayer), losses, batch_dim=BATCH_DIM, quantities=psg_fx.Grads(), backend="eager"
    )

    def interrupted() -> Iterator[Any]:
        yield (one.inputs, one.targets[0], {}), torch.tensor([0])
        raise KeyboardInterrupt

    how: dict[str, Any] = {"store": tmp_path, "indices": 1, "prepare": lambda found: found[0], "progress": False}
    with pytest.raises(KeyboardInterrupt):
        psg_fx.over(interrupted(), made_step, **how)
    with pytest.raises(NotYetSupported, match="a part of a batch of rows of samples"):
        psg_fx.over([((two.inputs, two.targets[0], {}), torch.tensor([0, 1]))], made_step, **how)


def test_a_squeeze_of_one_sample() -> None:
    class Squeezed(OfNodes):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
            h = self.layer(x).new_zeros(count, 1).index_add(0, batch, self.layer(x).sum(1, keepdim=True))
            return h.squeeze()

    with pytest.raises(NotYetSupported, match="squeeze may treat a batch of one sample differently"):
        call(step(Squeezed().double(), lambda out, y: out), batch())


def test_samples_that_are_not_finite() -> None:
    """They are left out of a clipped sum, and other samples are as they were."""
    given = batch()
    x = given.whole.inputs[0].clone()
    x[4] = torch.nan  # of sample 2
    clipped = psg_fx.transform(
        made(OneLayer), losses, batch_dim=BATCH_DIM, quantities=psg_fx.ClippedSum(1.0), backend="eager"
    )
    out, good = call(clipped, given, x=x), call(clipped, given)
    assert out.clip_factors[2] == 0
    grads, factors = RowsTruth(made(OneLayer), losses, given).grads, good.clip_factors
    for name, value in out.clipped_sum.items():
        kept = [b for b in range(4) if b != 2]
        torch.testing.assert_close(value, sum(factors[b] * grads[name][b] for b in kept))


def test_rows_that_number_themselves() -> None:
    """`x[torch.arange(R), classes]` picks within each row."""

    class Picks(OfNodes):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
            h = self.layer(x).log_softmax(-1)
            h = h[torch.arange(h.shape[0]), (x[:, 0] > 0).long()]
            return h.new_zeros(count).index_add(0, batch, h)

    check(made(Picks), lambda out, y: out * (y + 1), [batch(), graphs([2, 4], [1, 0], "shuffled")])


def test_pointers_that_are_moved() -> None:
    """Numbers within a sample may be moved to where it begins; what is made of these may point, and be no mask."""

    class Moved(OfNodes):
        def forward(self, x: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
            place = torch.arange(x.shape[0])
            ids = torch.searchsorted(offsets, place, right=True) - 1
            h = self.layer(x)
            h = h + h[first + offsets[ids]]
            return h.new_zeros(offsets.shape[0], 4).index_add(0, ids, h)

    class Summed(Moved):
        def forward(self, x: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
            ids = torch.searchsorted(offsets, torch.arange(x.shape[0]), right=True) - 1
            return super().forward(x, (first + offsets[ids]).cumsum(0).clamp(max=2) * 0, offsets)

    rows = Rows.from_offsets("offsets")
    x, first, offsets = torch.randn(5, 4).double(), torch.tensor([1, 0, 2, 1, 0]), torch.tensor([0, 2])
    model = made(Moved)
    options: Any = {"batch_dim": ((rows, rows, 0), 0), "loss": lambda out, y: out.square().sum(1) * y}
    found = step(model, **options)((x, first, offsets), torch.ones(2).double())
    for s, own in enumerate((slice(0, 2), slice(2, 5))):
        loss = model(x[own], first[own], torch.tensor([0])).square().sum()
        norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm()
        torch.testing.assert_close(found.norms[s], norm)
    with pytest.raises(SamplesMixed, match="row 1 of the rows of input_0, input_1"):
        step(model, **options)((x, torch.tensor([1, 2, 2, 1, 0]), offsets), torch.ones(2).double())
    with pytest.raises(NotYetSupported, match="numbers of rows that values of samples are added to"):
        step(made(Summed), **options)((x, first, offsets), torch.ones(2).double())


def test_ids_of_another_number_of_rows() -> None:
    wrong = Rows(lambda x, edge_index, batch, count: batch, dim=1)
    with pytest.raises(BadArgument, match="there is not one id for each of the rows of input_1"):
        call(step(made(OneLayer), batch_dim=((Rows("batch"), wrong, Rows("batch"), 0), 0)), batch())


class Sorted(OfNodes):
    """Tokens in the order of their experts, and what each has of all before it."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        expert = self.layer(tokens).argmax(-1)
        order = expert.argsort()
        h = torch.tanh(self.layer(tokens[order])).cumsum(0)
        return torch.zeros_like(tokens).index_add(0, order, h).view(x.shape).sum((1, 2))


def test_sorted_experts_are_refused_by_name() -> None:
    made_step = psg_fx.transform(Sorted(), lambda out: out, quantities=psg_fx.Norms(), backend="eager")
    with pytest.raises(NotYetSupported, match=r"aten.argsort(.|\n)*gather what each row needs(.|\n)*or compute all"):
        made_step(torch.randn(3, 5, 4))


class Experts(OfNodes):
    """The same by masks: all experts compute all rows, and each row takes those that it was sent to."""

    def __init__(self, gathered: bool) -> None:
        super().__init__()
        self.gathered, self.experts = gathered, nn.Parameter(torch.randn(4, 4, 4))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        score, expert = self.layer(x).softmax(-1).topk(2)
        if self.gathered:
            each = torch.einsum("rd,rked->rke", x, self.experts[expert])
        else:
            each = torch.stack([
                sum((expert[:, k] == e)[:, None] * (x @ self.experts[e].T) for e in range(4)) for k in range(2)
            ], 1)  # fmt: skip
        h = torch.tanh((score[..., None] * each).sum(1))
        return h.new_zeros(count, 4).index_add(0, batch, h)


@pytest.mark.parametrize("gathered", one_in(2, [False, True]))
def test_experts_without_an_order(gathered: bool) -> None:
    """The two ways out that a refusal names, on rows."""
    torch.manual_seed(0)
    check(Experts(gathered).double(), losses, [batch()], quantities=[psg_fx.Grads(), psg_fx.ClippedSum(0.1)])
