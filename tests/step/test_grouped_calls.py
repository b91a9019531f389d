"""Calls with `groups=`: what they take, what they refuse in words, and what stands around them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import psg_fx
from psg_fx import ClippedSum, Dots, Grads, Gram, MeanGrad, Norms, Projection, SecondMoment, WeightedSum
from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.step.constants import Constants
from psg_fx.step.groups import groups_of, unseen
from support.selection import one_in
from support.small import mlp, same_mlp, step

LINEAR = [Grads(), WeightedSum(), MeanGrad(), Dots(), Projection(rank=2)]
SQUARES = [Norms(), ClippedSum(0.3), SecondMoment()]


@functools.cache
def shared() -> Any:
    """A step for tests of what it is given: nobody changes its model."""
    return step(same_mlp(), quantities=[*LINEAR, *SQUARES, Gram()])


of_one_step = pytest.mark.xdist_group("grouped calls")


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator).double(), torch.randint(3, (size,), generator=generator)


def given(count: int) -> dict[str, Any]:
    torch.manual_seed(1)
    directions = {name: torch.randn_like(p) for name, p in same_mlp().named_parameters()}
    return {"weights": torch.linspace(-1, 1, count).double(), "directions": directions}


def compare(a: Any, b: Any) -> None:
    torch.testing.assert_close(vars(a), vars(b), atol=1e-10, rtol=1e-10)


@of_one_step
def test_what_numbers_of_groups_may_be() -> None:
    """A tuple, int32, with gaps in memory, NumPy."""
    made, extra = shared(), given(3)
    expected = made(*batch(6), groups=torch.tensor([2, 0, 2, -1, 2, 2]), **extra)
    for ids in (
        (2, 0, 2, -1, 2, 2), torch.tensor([2, 0, 2, -1, 2, 2], dtype=torch.int32),
        torch.tensor([[2, 0, 2, -1, 2, 2]] * 2).T[:, 0], torch.tensor([2, 0, 2, -1, 2, 2]).to(torch.int8).numpy(),
    ):  # fmt: skip
        compare(made(*batch(6), groups=ids, **extra), expected)


@of_one_step
@pytest.mark.parametrize("ids", [[2, 0, 2, -1, 2, 2], [0, 2, 0, 1, 2, 2], [0, 0, 1, 1, 2, 2], [-1] * 6])
def test_the_default_device_is_another_one(ids: list[int]) -> None:
    made, extra = shared(), given(3)
    calls = [functools.partial(made, *batch(6), groups=g, num_groups=3, **extra) for g in (ids, torch.tensor(ids))]
    expected = calls[0]()
    with torch.device("meta"):
        for call in calls:
            compare(call(), expected)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"groups": [0] * 5}, r"groups is of shape \(5,\)"), ({"groups": torch.zeros(6)}, "groups is of float32"),
        ({"groups": torch.zeros(6, 1).long()}, r"of shape \(6, 1\)"), ({"groups": [True] * 6}, "groups is of bool"),
        ({"groups": "abcdef"}, "groups is a str"), ({"groups": {"a": 1}}, "groups is a dict"),
        ({"groups": [0, 0, 1, -2, 1, 1]}, "groups has the number -2"),
        ({"groups": [-2] * 6}, "groups has the number -2(.|\n)*why    they are counted from 0"),
        ({"groups": [0, 0, 1, 7, 1, 1], "num_groups": 3}, "groups has the number 7(.|\n)*pass num_groups=8"),
        ({"groups": [0] * 6, "num_groups": 0}, "there are 0 groups"), ({"num_groups": 3}, "given without groups"),
        ({"groups": [10**12, 0, 1, 1, 1, 1]}, "results would have a row for each(.|\n)*return_inverse=True"),
        ({"groups": [0] * 6, "num_groups": 2.0}, "num_groups=2.0 is not"),
        ({"groups": [0] * 6, "num_groups": True}, "num_groups=True is not"),
        ({"groups": [0] * 6, "num_groups": -1}, "num_groups=-1 is not"),
        ({"groups": [0, 1] * 3, "weights": torch.ones(6)}, "one for each of the 2 groups"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_mistakes(wrong: dict[str, Any], words: str) -> None:
    made = step(same_mlp(), quantities=WeightedSum())
    with pytest.raises(BadArgument, match=words):
        made(*batch(6), **{"weights": torch.ones(2), **wrong})


@of_one_step
def test_no_samples_and_no_groups() -> None:
    made, extra = shared(), given(3)
    x, y = batch(6)
    out = made(x[:0], y[:0], groups=[], num_groups=3, **extra)
    assert (out.norms == 0).all()
    assert (out.clip_factors == 1).all()
    assert out.gram.shape == (3, 3)
    assert out.grads["0.weight"].shape == (3, 5, 4)
    assert all((value == 0).all() for value in (*out.clipped_sum.values(), *out.second_moment.values()))
    nobody = made(x, y, groups=[-1] * 6, **given(0))
    assert nobody.norms.shape == (0,)
    assert nobody.gram.shape == (0, 0)
    assert all((value == 0).all() for value in (*nobody.clipped_sum.values(), *nobody.second_moment.values()))
    own = made(x, y, **given(6))
    torch.testing.assert_close(nobody.losses, own.losses)
    torch.testing.assert_close(dict(nobody.mean_grad), dict(own.mean_grad))
    assert made(x[:0], y[:0], groups=[], **given(0)).norms.shape == (0,)


def test_factors_of_nothing() -> None:
    """What a group without samples is clipped by is the same with samples in other groups and with none."""
    per = ClippedSum(0.5, per="parameter", style="automatic")
    made = step(same_mlp(), quantities=per)
    x, y = batch(4)
    some, none = made(x, y, groups=[1, 1, 1, 1], num_groups=2), made(x[:0], y[:0], groups=[], num_groups=2)
    for name, factors in none.clip_factors.items():
        torch.testing.assert_close(factors, some.clip_factors[name][:1].expand(2))


def test_calls_with_and_without_groups_alternate() -> None:
    made = step(same_mlp(), quantities=SQUARES)
    x, y = batch(6)
    alone = made(x, y)
    each = made(x, y, groups=range(6))
    compare(alone, each)
    assert made(x, y, groups=[0, 0, 0, 1, 1, 1]).norms.shape == (2,)
    compare(made(x, y), alone)
    assert len(made.captures) == 2


@of_one_step
def test_a_group_of_each_sample_is_the_sample() -> None:
    """Also where its number says nothing of its place."""
    made, extra = shared(), given(5)
    x, y = batch(5)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(made(x, y, groups=order, **extra).norms[order], made(x, y, **extra).norms)


def test_weighted_and_per_parameter() -> None:
    quantities = [ClippedSum(0.3, per="parameter", weighted=True), Norms(per="parameter")]
    made = step(same_mlp(), quantities=quantities)
    x, y = batch(6)
    ids, weights = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([2.0, 0.0]).double()
    out = made(x, y, groups=ids, weights=weights)
    first = made(x[:3], y[:3], groups=[0, 0, 0], weights=torch.tensor([2.0]).double())
    torch.testing.assert_close(dict(out.clipped_sum), dict(first.clipped_sum))
    torch.testing.assert_close(out.norms["0.weight"][:1], first.norms["0.weight"])


def test_numbers_that_nobody_looks_at() -> None:
    """On CUDA with num_groups= the numbers are not read: one out of range makes all that is asked NaN."""
    good, bad = (unseen(torch.tensor(ids), 3) for ids in ([0, 2, -1], [0, 3, 1]))
    assert good.rows is not None
    assert good.rows.tolist() == [0, 2, -1]
    value = torch.ones(3, 2)
    assert torch.equal(good.every(value, (0,)), value)
    assert bad.every(value, (0,)).isnan().all()
    assert bad.rows is not None
    assert bad.rows.tolist() == [0, -1, 1]
    assert unseen(torch.tensor([-1, -1]), 0).every(torch.ones(1, 2), (0,)).shape == (0, 2)


@of_one_step
def test_unseen_numbers_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = shared()
    x, y = batch(6)
    ids, extra = torch.tensor([2, 0, 2, -1, 2, 0]), given(4)
    seen = made(x, y, groups=ids, num_groups=4, **extra)
    monkeypatch.setattr("psg_fx.step.with_loss.groups_of", lambda ids, count, *_: unseen(ids, count))
    compare(made(x, y, groups=ids, num_groups=4, **extra), seen)
    broken = made(x, y, groups=torch.tensor([2, 0, 2, 4, 2, 0]), num_groups=4, **extra)
    assert all(value.isnan().all() for value in broken.grads.values())
    assert broken.norms.isnan().all()
    assert not broken.losses.isnan().any()


def test_memory_that_many_empty_groups_take() -> None:
    """The graph has the groups of the batch and one that stands for all others."""
    found = groups_of([10**6, 3, 3], None, 3)
    assert found.count == 10**6 + 1
    assert found.members.tolist() == [[-1, -1], [1, 2], [0, -1]]
    one_large = groups_of([0] * 100 + list(range(1, 101)), None, 200)
    assert one_large.grouping.layout == "scattered"
    assert one_large.inputs(torch.device("cpu"), False, Constants())["members"].numel() <= 200


def test_parts() -> None:
    """What is linear in the gradient is summed over parts; what is not needs groups in one part."""
    x, y = batch(9)
    ids, extra = [2, 0, 2, -1, 2, 2, 0, 4, 4], given(6)
    linear = step(same_mlp(), quantities=LINEAR)
    compare(
        psg_fx.microbatch(linear, 2)(x, y, groups=ids, num_groups=6, **extra),
        linear(x, y, groups=ids, num_groups=6, **extra),
    )
    everything = step(same_mlp(), quantities=[*LINEAR, *SQUARES])
    whole = [2, 2, -1, 1, 1, -1, 4, 4, 4]  # two of no group, in two parts
    in_parts = psg_fx.microbatch(everything, 3)(x, y, groups=whole, num_groups=6, **extra)
    compare(in_parts, everything(x, y, groups=whole, num_groups=6, **extra))
    with pytest.raises(BadArgument, match="group 0 has samples in several parts of 3"):
        psg_fx.microbatch(everything, 3)(x, y, groups=ids, num_groups=6, **extra)


def test_memory_budget() -> None:
    made = step(same_mlp(), quantities=ClippedSum(0.3), memory_budget=10**5)
    x, y = batch(6)
    compare(
        made(x, y, groups=[0, 0, 1, 1, 2, 2]),
        step(same_mlp(), quantities=ClippedSum(0.3))(x, y, groups=[0, 0, 1, 1, 2, 2]),
    )
    tight = step(same_mlp(), quantities=ClippedSum(0.3), memory_budget=100)
    with pytest.raises(BadArgument, match="a quantity needs all of these 6 samples at once"):
        tight(x, y, groups=[0, 0, 1, 1, 2, 2])


@of_one_step
def test_validate() -> None:
    made = shared()
    for ids in ([0, 0, 1, 1, 2, 2], [2, 0, 2, -1, 2, 2]):
        report = made.validate(*batch(6), groups=ids, num_groups=4, **given(4))
        assert report.ok, str(report)
        assert {row.asked for row in report.rows} >= {"mean_grad", "gram", "clipped_sum"}


@of_one_step
@pytest.mark.parametrize("centered", [False, True])
def test_validate_where_no_sample_is_in_a_group(centered: bool) -> None:
    made = step(same_mlp(), quantities=SecondMoment(centered=True)) if centered else shared()
    report = made.validate(*batch(6), groups=[-1] * 6, **({} if centered else given(0)))
    assert report.ok, str(report)


def test_validate_sees_a_wrong_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step(same_mlp(), quantities=Norms())
    monkeypatch.setattr(
        "psg_fx.step.with_loss.groups_of",
        lambda ids, count, samples, *_: groups_of(list(reversed(ids)), count, samples),
    )
    assert not made.validate(*batch(6), groups=[0, 0, 1, 1, 1, 2]).ok


@pytest.mark.rest
@pytest.mark.usefixtures("fresh_compiler")
def test_outputs_are_used_again() -> None:
    made = psg_fx.transform(same_mlp(), F.cross_entropy, quantities=[Grads(), ClippedSum(0.3)], reuse_outputs=True)
    x, y = batch(6)
    want = step(same_mlp(), quantities=[Grads(), ClippedSum(0.3)])
    out = made(x, y, groups=[0, 0, 1, 1, 2, 2])
    kept = out.grads["0.weight"]
    again = made(x, y, groups=[0, 1, 2, 2, 1, 0], out=out)
    assert again is out
    assert again.grads["0.weight"] is kept
    compare(again, want(x, y, groups=[0, 1, 2, 2, 1, 0]))


def test_explain_says_what_the_axes_are() -> None:
    made, (x, y) = step(same_mlp(), quantities=Norms()), batch(6)
    made(x, y, groups=[0, 0, 0, 1, 1, 1])
    text = made.explain()
    assert "planned for G=2 groups of up to 3 samples, 6 in all, on cpu" in text
    assert "b: groups, r: samples of a group (they lie in order) and positions" in text
    made(x, y, groups=[0, 1, 0, 1, 0, 1])
    assert "(brought in order)" in made.explain()
    made(x, y)
    assert "b: samples" in made.explain()


def test_without_a_loss_there_is_no_such_argument() -> None:
    made = psg_fx.transform(mlp(), backend="eager")
    with pytest.raises(BadArgument, match="the keyword groups"):
        made(torch.randn(4, 4), groups=[0, 0, 1, 1])


def test_a_file_has_no_groups(tmp_path: Path) -> None:
    made, (x, y) = step(same_mlp(), quantities=Norms()), batch(4)
    with pytest.raises(NotYetSupported, match="a step of groups is not exported"):
        made.export(tmp_path / "step.pt2", x, y, groups=[0, 0, 1, 1])


def test_means_over_groups_of_several_processes_are_refused() -> None:
    made, (x, y) = step(same_mlp(), quantities=[SecondMoment(), MeanGrad(), ClippedSum(1.0)]), batch(4)
    out = made(x, y, groups=[0, 0, 1, 1])
    assert out.joins == {
        "losses": "cat", "second_moment": "groups", "mean_grad": "mean", "clipped_sum": "sum", "clip_factors": "cat",
        "norms": "cat",
    }  # fmt: skip
    with pytest.raises(BadArgument, match="SecondMoment of groups in all processes"):
        psg_fx.distributed.reduce(out)
    assert "groups" not in made(x, y).joins.values()


@pytest.mark.parametrize("ids", one_in(2, [[1, 0, 1, -1], [0, 0, 1, 1]]))
def test_report_and_plans_elsewhere(ids: list[int], tmp_path: Path) -> None:
    made, (x, y) = step(same_mlp(), quantities=[Norms(), ClippedSum(1.0)]), batch(4)
    made(x, y, groups=ids)
    assert "planned for G=2 groups" in made.explain(device="h100")
    assert "planned for G=2 groups" in made.report(tmp_path / "report.html").read_text(encoding="utf-8")
