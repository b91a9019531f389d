"""A step over a loader is the step on all its samples at once."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum
from psg_fx.distributed.sharded import ShardedModule
from psg_fx.errors import BadArgument, NotYetSupported
from support import oracle
from support.batches import Stream, compare, loader, samples
from support.selection import one_in
from support.small import OwnLoss, mlp, same_mlp, step

EVERYTHING = [
    Grads(), Norms(), ClippedSum(0.3), WeightedSum(), MeanGrad(), SecondMoment(), Projection(rank=2), Dots(),
]  # fmt: skip


@pytest.mark.parametrize(("count", "size"), one_in(2, [(11, 4), (8, 4), (3, 5), (5, 1)]))
def test_all_quantities_over_batches_are_those_of_one_batch(count: int, size: int) -> None:
    own = step(quantities=EVERYTHING)
    x, y = samples(count)
    weights = torch.linspace(-1, 2, count)
    directions = {n: torch.randn(2, *p.shape) for n, p in own.model.named_parameters()}
    data = DataLoader(TensorDataset(x, y, weights), size)
    out = psg_fx.over(
        data, own, prepare=lambda b: (b[0], b[1], {"weights": b[2]}), directions=directions, progress=False
    )
    compare(out, own(x, y, weights=weights, directions=directions))
    assert len(out) == count


def test_sums_are_those_of_the_loop_over_single_samples() -> None:
    """In float64, from batches of other sizes than one."""
    model = same_mlp()
    x, y = samples(7, torch.float64)
    quantities = [MeanGrad(), SecondMoment(centered=True), Norms(), ClippedSum(0.5, per="parameter")]
    out = psg_fx.over(DataLoader(TensorDataset(x, y), 3), step(model, quantities=quantities[:2]), progress=False)
    losses, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    assert oracle.relative_error(out.losses, losses) < 1e-12
    for name, each in grads.items():
        assert oracle.relative_error(out.mean_grad[name], each.mean(0)) < 1e-12
        assert oracle.relative_error(out.second_moment[name], each.var(0, correction=0)) < 1e-10


@pytest.mark.slow
def test_a_mean_of_many_small_float32_batches_loses_no_digits() -> None:
    """0.1, added up one after the other in float32, would be another number."""
    linear = nn.Linear(1, 1, bias=False)
    own = step(linear, lambda out: out.sum(), quantities=WeightedSum())
    batch = (torch.full((1, 1), 0.1), None, {"weights": torch.ones(1)})
    out = psg_fx.over((batch for _ in range(3000)), own, progress=False)
    want = torch.tensor(0.1).double() * 3000
    assert out.weighted_sum["weight"].item() == want.float().item()


def test_dicts_with_labels_inside() -> None:
    own = step(OwnLoss(), lambda out: out["loss"], quantities=[Norms(), MeanGrad()])
    x, y = samples(7)
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    compare(psg_fx.over(DataLoader(rows, 3), own, progress=False), own({"x": x, "labels": y}))  # type: ignore[arg-type]


def test_mappings_that_are_no_dicts() -> None:
    transformers = pytest.importorskip("transformers")
    own = step(OwnLoss(), lambda out: out["loss"])
    x, y = samples(5)
    batches = [transformers.BatchEncoding({"x": x[s], "labels": y[s]}) for s in (slice(0, 3), slice(3, 5))]
    compare(psg_fx.over(batches, own, progress=False), own({"x": x, "labels": y}))


def test_other_batches_by_prepare() -> None:
    own = step(quantities=Norms())
    x, y = samples(6)
    odd = [SimpleNamespace(a=x[:4], b=y[:4]), SimpleNamespace(a=x[4:], b=y[4:])]
    compare(psg_fx.over(odd, own, prepare=lambda b: (b.a, b.b), progress=False), own(x, y))


def test_inputs_alone_and_samples_in_another_dim() -> None:
    own = step(nn.Linear(4, 1), lambda out: out.sum(), quantities=Norms(), batch_dim=1)
    x = torch.randn(5, 7, 4)
    parts = [x[:, :3], (x[:, 3:],)]
    compare(psg_fx.over(parts, own, progress=False), own(x))


@pytest.mark.parametrize("batch", [(1, 2, 3, 4), (1, 2, 3), "text", 3.0])
def test_unknown_batches_are_refused(batch: Any) -> None:
    with pytest.raises(BadArgument, match="over\\(\\.\\.\\., prepare=lambda batch"):
        psg_fx.over([batch], step(), progress=False)


def test_streams() -> None:
    own = step(quantities=[Norms(), MeanGrad()])
    compare(psg_fx.over(DataLoader(Stream(11), 2), own, progress=False), own(*samples(11)))


def test_a_smaller_last_batch_may_be_left_out_and_may_be_empty() -> None:
    own = step(quantities=[Norms(), MeanGrad()])
    x, y = samples(11)
    compare(psg_fx.over(loader(11, 4, drop_last=True), own, progress=False), own(x[:8], y[:8]))
    compare(psg_fx.over([(x[:0], y[:0]), (x, y), (x[:0], y[:0])], own, progress=False), own(x, y))


def test_no_samples_are_refused() -> None:
    with pytest.raises(BadArgument, match="gives no samples"):
        psg_fx.over([], step(), progress=False)


def test_indices_say_which_sample_a_row_is_of() -> None:
    x, y = samples(9)
    own = step(quantities=Norms())
    whole = own(x, y)
    data = TensorDataset(x, y, torch.arange(9))
    shuffled = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    for indices in (2, -1):
        out = psg_fx.over(shuffled, own, indices=indices, progress=False)
        assert out.indices.tolist() != list(range(9))
        assert torch.allclose(out.norms, whole.norms[out.indices])
    rows = [{"x": a, "labels": b, "place": i} for i, (a, b) in enumerate(zip(x, y, strict=True))]
    own = step(OwnLoss(), lambda out: out["loss"], quantities=Norms())
    by_key = psg_fx.over(DataLoader(rows, 4), own, indices="place", progress=False)  # type: ignore[arg-type]
    assert by_key.indices.tolist() == list(range(9))
    with pytest.raises(BadArgument, match="no indices at 'where'"):
        psg_fx.over(DataLoader(rows, 4), own, indices="where", progress=False)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="indices has 1 rows for 4 samples"):
        psg_fx.over(shuffled, step(), indices=lambda b: 0, prepare=lambda b: b[:2], progress=False)


@pytest.mark.parametrize(
    ("quantities", "text"),
    [(Gram(), "ask for Projection"), (SecondMoment(centered=True), r"ask for MeanGrad\(\) as well")],
)
def test_what_does_not_follow_from_batches_is_refused_before_anything_runs(quantities: Any, text: str) -> None:
    def never() -> Iterator[Any]:
        raise AssertionError("a batch was taken")
        yield

    with pytest.raises(BadArgument, match=text):
        psg_fx.over(never(), step(quantities=quantities), progress=False)


def test_what_is_no_step_with_a_loss_is_refused() -> None:
    with pytest.raises(BadArgument, match="not a step with a loss"):
        psg_fx.over([], psg_fx.transform(mlp(), backend="eager"))
    with pytest.raises(BadArgument, match="choose the loader's batch size"):
        psg_fx.over([], psg_fx.microbatch(step(), 2))


def test_a_step_of_a_sharded_model_is_refused() -> None:
    with pytest.raises(NotYetSupported, match="sums of a call are those of all processes already") as refused:
        psg_fx.over([], ShardedModule.__new__(ShardedModule))
    assert "DistributedSampler" in str(refused.value)


def test_groups_over_batches_are_those_of_one_batch() -> None:
    """Whatever batches the samples of a group lie in; one group has none, and some samples are in no group."""
    x, y = samples(11)
    ids = torch.tensor([0, 3, 0, -1, 1, 3, 3, 0, 1, -1, 0])
    own = step(quantities=[Grads(), Dots(), Projection(rank=2), WeightedSum(), MeanGrad()])
    directions = {n: torch.randn(2, *p.shape) for n, p in own.model.named_parameters()}
    given = {"directions": directions, "weights": torch.linspace(-1, 2, 5)}
    whole = own(x, y, groups=ids, num_groups=5, **given)
    data = DataLoader(TensorDataset(x, y, ids), 4)
    for groups, prepare in ((2, None), (-1, None), (lambda b: b[2], lambda b: b[:2])):
        out = psg_fx.over(data, own, groups=groups, num_groups=5, prepare=prepare, progress=False, **given)
        compare(out, whole)
    rows = [{"x": a, "labels": b, "user": i} for a, b, i in zip(x, y, ids, strict=True)]
    named = step(OwnLoss(), lambda out: out["loss"], quantities=Grads())
    by_key = psg_fx.over(DataLoader(rows, 4), named, groups="user", num_groups=5, progress=False)  # type: ignore[arg-type]
    compare(by_key, named({"x": x, "labels": y}, groups=ids, num_groups=5))
    scores, places = by_key.top({n: g[1] for n, g in by_key.grads.items()}, 5)
    assert sorted(places.tolist()) == [0, 1, 2, 3, 4]
    assert scores[0] >= scores[-1]


def test_groups_are_those_of_the_loop_over_single_samples() -> None:
    model = same_mlp()
    x, y = samples(7, torch.float64)
    ids = torch.tensor([1, 0, 1, 1, 0, 0, 1])
    own = step(model, quantities=Grads())
    out = psg_fx.over(DataLoader(TensorDataset(x, y, ids), 3), own, groups=2, num_groups=2, progress=False)
    _, grads = oracle.loop_grads(model, F.cross_entropy, x, y)
    for name, each in grads.items():
        truth = torch.stack([each[ids == group].sum(0) for group in (0, 1)])
        assert oracle.relative_error(out.grads[name], truth) < 1e-12


@pytest.mark.parametrize("quantity", [Norms(), ClippedSum(0.5), Gram(), SecondMoment()])
def test_what_is_not_linear_in_a_group_is_refused(quantity: Any) -> None:
    with pytest.raises(BadArgument, match="of groups do not follow from those of batches") as refused:
        psg_fx.over(iter([]), step(quantities=[Grads(), quantity]), groups=2, num_groups=3)
    assert "may lie in several batches" in str(refused.value)
    assert "ask for Grads()" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"groups": 2}, "num_groups=None is not a number of groups"),
        ({"groups": 2, "num_groups": 0}, "num_groups=0 is not a number of groups"),
        ({"num_groups": 3}, "num_groups is given without groups"),
        ({"groups": 2, "num_groups": 3, "indices": 2}, "indices= does not go with groups="),
        ({"groups": 2, "num_groups": 3, "store": "nowhere"}, "store= does not go with groups="),
        ({"groups": "user", "num_groups": 3}, "a batch has no groups at 'user'"),
    ],
)
def test_wrong_groups_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(BadArgument, match=text):
        psg_fx.over(loader(4, 2), step(quantities=Grads()), progress=False, **given)


def test_groups_in_a_batch_and_weights_for_all_batches_are_refused() -> None:
    data = loader(4, 2)
    with pytest.raises(BadArgument, match="a batch's call has groups") as refused:
        psg_fx.over(data, step(), prepare=lambda b: (*b, {"groups": [0, 1]}), progress=False)
    assert "over(loader, step, groups=..., num_groups=G)" in str(refused.value)
    with pytest.raises(BadArgument, match="for every sample, and is given once"):
        psg_fx.over(data, step(quantities=WeightedSum()), weights=torch.ones(2))


def test_a_quantity_that_claims_rows_has_one_for_every_sample() -> None:
    class Wrong(Norms):
        def finish(self, *args: Any) -> dict[str, Any]:
            return {"norms": super().finish(*args)["norms"][:1]}

    class Scalar(Norms):
        def finish(self, *args: Any) -> dict[str, Any]:
            return {"norms": super().finish(*args)["norms"].sum()}

    with pytest.raises(BadArgument, match="norms has 1 rows for 2 samples"):
        psg_fx.over(loader(4, 2), step(quantities=Wrong()), progress=False)
    with pytest.raises(BadArgument, match="norms has no rows, and there are 2 samples"):
        psg_fx.over(loader(4, 2), step(quantities=Scalar()), progress=False)


def test_top_is_that_of_all_inner_products() -> None:
    own = step(quantities=[Projection(rank=2), Grads()])
    x, y = samples(11)
    out = psg_fx.over(loader(11, 4), own, progress=False)
    asked = own(x[:2] + 0.1, y[:2])
    truth = {"projection": asked.projection @ out.projection.T}
    truth["grads"] = sum(asked.grads[n].flatten(1) @ g.flatten(1).T for n, g in out.grads.items())
    for block, largest in itertools.product((1, 3, 100), (True, False)):
        for field, products in truth.items():
            scores, places = out.top(getattr(asked, field), 4, block=block, largest=largest)
            want = products.topk(4, 1, largest)
            assert torch.allclose(scores, want.values, atol=1e-5)
            assert torch.equal(places, want.indices)
        one = out.top(asked.projection[0], 4, block=block, largest=largest)
        assert [t.shape for t in one] == [(4,), (4,)]
        assert torch.equal(one[1], out.top(asked.projection, 4, largest=largest)[1][0])


def test_top_gives_places_in_the_data_set() -> None:
    x, y = samples(9)
    own = step(quantities=Projection(rank=2))
    shuffled = DataLoader(TensorDataset(x, y, torch.arange(100, 109)), 4, shuffle=True)
    out = psg_fx.over(shuffled, own, indices=2, progress=False)
    phi = own(x, y).projection
    assert torch.equal(out.top(phi[:3], 9)[1], 100 + (phi[:3] @ phi.T).argsort(1, descending=True))


def test_scalar_parameters_and_no_queries() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    own = step(Scaled(), quantities=Grads())
    out = psg_fx.over(loader(7, 4), own, progress=False)
    asked = own(*samples(3)).grads
    truth = sum(g.reshape(3, -1) @ out.grads[n].reshape(7, -1).T for n, g in asked.items())
    assert torch.equal(out.top(asked, 4)[1], truth.topk(4).indices)
    assert torch.equal(out.top({n: g[1] for n, g in asked.items()}, 4)[1], truth[1].topk(4).indices)
    assert [t.shape for t in out.top({n: g[:0] for n, g in asked.items()}, 4)] == [(0, 4), (0, 4)]


def test_queries_that_do_not_fit_are_refused() -> None:
    out = psg_fx.over(loader(5, 4), step(quantities=[Projection(rank=2), Norms()]), progress=False)
    bad: list[tuple[Any, int, str]] = [
        (out.projection, 6, "k=6 is not a number of samples"),
        (out.projection, 0, "from 1 to 5"),
        (out.projection[:, :3], 2, "that shape, or with a leading Q"),
        (out.projection[0, 0], 2, "that shape, or with a leading Q"),
        ([1.0], 2, "the query is a list"),
        ({"0.weight": torch.zeros(5, 4)}, 2, "there is no grads, only losses, projection, norms"),
    ]
    for query, k, text in bad:
        with pytest.raises(BadArgument, match=text):
            out.top(query, k)
    out = psg_fx.over(loader(5, 4), step(), progress=False)
    with pytest.raises(BadArgument, match=r"grads has 0\.weight, 0\.bias"):
        out.top({"0.weight": torch.zeros(5, 4)}, 2)
    with pytest.raises(BadArgument, match="differ in their number of queries"):
        out.top({n: g[0] if "bias" in n else g[:1] for n, g in out.grads.items()}, 2)


def test_half_precision_is_multiplied_in_float32() -> None:
    out = psg_fx.over(loader(6, 4), step(mlp().bfloat16(), quantities=Grads()), progress=False,
                      prepare=lambda b: (b[0].bfloat16(), b[1]))  # fmt: skip
    assert out.grads["0.weight"].dtype == torch.bfloat16
    scores, _ = out.top(out.grads, 6)
    assert scores.dtype == torch.float32


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_batches_are_counted_with_and_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    own = step(quantities=Norms(), progress=False)
    terminal = Terminal()
    monkeypatch.setattr("psg_fx.progress.sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setitem(sys.modules, "tqdm", None)
    psg_fx.over(loader(5, 2), own)
    assert [line for line in terminal.getvalue().split("\r\033[K") if line] == [
        f"psg_fx: batch {k} of 3" for k in (1, 2, 3)
    ]
    seen: list[dict[str, Any]] = []

    def bar(batches: Any, **options: Any) -> Any:
        seen.append(options)
        return batches

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=bar))
    psg_fx.over(loader(5, 2), own)
    psg_fx.over(loader(5, 2), own, progress=False)
    assert seen == [{"total": 3, "initial": 0, "unit": "batch", "disable": None}]


def test_results_of_processes_are_put_together_like_outputs() -> None:
    own = step(quantities=[Norms(), MeanGrad()])
    out = psg_fx.over(loader(5, 2), own, progress=False)
    assert out.joins == own(*samples(5)).joins
    assert "top" not in vars(out)


def test_samplers_with_replacement_are_fine_in_memory() -> None:
    data = TensorDataset(*samples(4))
    drawn = DataLoader(data, 3, sampler=RandomSampler(data, replacement=True, num_samples=10))
    assert len(psg_fx.over(drawn, step(quantities=Norms()), progress=False)) == 10
