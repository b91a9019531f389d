"""Memory: what a step needs is predicted, and a budget is kept or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import psg_fx
from psg_fx import BadArgument, ClippedSum, Grads, Gram, MeanGrad, Norms, PsgError, SecondMoment, zoo
from psg_fx.measure.clock import peak_memory
from psg_fx.planner.budget import in_words
from psg_fx.planner.plan import PLAN
from support import oracle
from support.selection import one_in

B = 12


def example(name: str = "simplecnn", batch: int = B) -> zoo.Example:
    torch.manual_seed(0)
    sizes = {"simplecnn": {"width": 8, "hidden": 32}, "gpt": {"layers": 1, "width": 32, "tokens": 32, "vocabulary": 80}}
    return zoo.example(name, batch=batch, **sizes[name])


def step_of(ex: zoo.Example, quantities: Any, **settings: Any) -> Any:
    return psg_fx.transform(ex.model, ex.loss_fn, quantities=quantities, backend="eager", **settings)


def plan_of(step: Any) -> Any:
    return PLAN.of(step.graphs["planned"])


def peak(step: Any, ex: zoo.Example) -> int:
    return peak_memory(lambda: step(ex.inputs, ex.targets), torch.device("cpu"))


@pytest.mark.parametrize("quantity", one_in(3, [ClippedSum(0.1), Grads(), Norms()]))
def test_the_prediction_is_near_the_truth(quantity: Any) -> None:
    ex = example("gpt")
    step = step_of(ex, quantity, memory_budget=2**40)
    step(ex.inputs, ex.targets)
    predicted, measured = plan_of(step).need, peak(step, ex)
    assert 0.8 * measured < predicted < 2 * measured


@pytest.mark.slow
@pytest.mark.parametrize("share", one_in(2, [0.4, 0.6]))
def test_a_budget_is_kept(share: float) -> None:
    ex, asked = example("gpt"), [ClippedSum(0.1), MeanGrad(), SecondMoment()]
    free = step_of(ex, asked)
    want = free(ex.inputs, ex.targets)
    budget = int(share * peak(free, ex))
    bounded = step_of(ex, asked, memory_budget=budget)
    got = bounded(ex.inputs, ex.targets)
    assert plan_of(bounded).need <= budget
    for field in ("losses", "norms", "clip_factors"):
        assert oracle.relative_error(getattr(got, field), getattr(want, field)) < 1e-4
    for field in ("clipped_sum", "mean_grad", "second_moment"):
        assert oracle.worst_error(getattr(got, field), getattr(want, field)) < 1e-4
    assert peak(bounded, ex) <= budget


def test_a_larger_batch_has_a_plan_of_its_own_where_the_first_one_has_no_room() -> None:
    """However few samples the first call had; and all sizes up to the larger one share that plan."""
    sizes = (4, 11, 7, 3)
    batches = {size: example(batch=size) for size in sizes}
    first = step_of(batches[4], ClippedSum(0.1), memory_budget=2**30)
    first(batches[4].inputs, batches[4].targets)
    step = step_of(batches[4], ClippedSum(0.1), memory_budget=int(3.9 * plan_of(first).need))
    want = psg_fx.transform(step.model, step.loss_fn, quantities=ClippedSum(0.1), backend="eager")
    for size in sizes:
        got, expected = (s(batches[size].inputs, batches[size].targets) for s in (step, want))
        assert oracle.worst_error(got.clipped_sum, expected.clipped_sum) < 1e-5
        assert oracle.relative_error(got.norms, expected.norms) < 1e-5
    assert len(step.captures) == 2


def test_one_plan_serves_all_sizes_for_which_there_is_room() -> None:
    ex = zoo.example("mlp", batch=20)
    step = step_of(ex, [Norms(), Gram()], memory_budget=2**30)
    for size in range(2, 21):
        step(ex.inputs[:size], ex.targets[:size])
    assert len(step.captures) == 1


def test_after_a_small_batch_larger_ones_run_in_parts_that_fit() -> None:
    whole, few = example(), example(batch=2)
    free = step_of(whole, Norms(), memory_budget=2**40)
    want = free(whole.inputs, whole.targets).norms
    step = step_of(few, Norms(), memory_budget=int(0.7 * plan_of(free).need))
    step(few.inputs, few.targets)
    assert oracle.relative_error(step(whole.inputs, whole.targets).norms, want) < 1e-5
    assert 2 < plan_of(step).part < B
    assert "samples run in parts of as many" in " ".join(str(step.explain()).split())


def test_what_a_budget_changes_is_told_at_the_rates_of_the_device() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3))
    made: list[Any] = []
    for budget in (2**40, None):
        step = psg_fx.transform(
            model, lambda out: out.square().sum(), quantities=[Norms(), Gram()], backend="eager",
            memory_budget=budget or plan_of(made[0]).need - 1,
        )  # fmt: skip
        step(torch.randn(16, 3, 16, 16))
        made.append(step)
    roomy, tight = map(plan_of, made)
    assert tight.device == roomy.device
    assert tight.need < roomy.need
    told = " ".join(made[1].explain().split())
    assert f"({in_words(roomy.need)} without it)" in told
    assert "No tree is another one" not in told
    for parameter in tight.parameters:
        nodes = {key: node for part in parameter.parts for key, node in part.tree.nodes.items()}
        assert parameter.seconds == pytest.approx(sum(node.seconds(tight.device) for node in nodes.values()))


@pytest.mark.parametrize("quantity", [ClippedSum(0.1), Gram()], ids=str)
def test_the_first_batch_may_be_empty_or_small(quantity: Any) -> None:
    ex = zoo.example("mlp", batch=6)
    step = step_of(ex, quantity, memory_budget=2**20)
    want = step_of(ex, quantity)
    for size in (0, 1, 6):
        got, expected = (vars(s(ex.inputs[:size], ex.targets[:size])) for s in (step, want))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM])
def test_what_is_kept_for_parameters_that_are_not_asked(kind: type[torch.nn.Module]) -> None:
    """The joint graph returns values that no network of these parameters reads."""
    layer: Any = kind(4, 5)
    step = psg_fx.transform(
        layer, lambda out: out[0].square().sum(), quantities=Norms(), params="*bias*", batch_dim=1, backend="eager",
        memory_budget=2**30,
    )  # fmt: skip
    assert step(torch.randn(3, 6, 4)).norms.shape == (6,)


@pytest.mark.slow
def test_too_little_says_what_would_do() -> None:
    ex = example()
    with pytest.raises(BadArgument, match="a memory budget of 10 kB is too small") as refusal:
        step_of(ex, Norms(), memory_budget=10_000)(ex.inputs, ex.targets)
    least = int(re.search(r"memory_budget=(\d+)", str(refusal.value))[1])  # type: ignore[index]
    step = step_of(ex, Norms(), memory_budget=least)
    assert step(ex.inputs, ex.targets).norms.shape == (B,)
    assert plan_of(step).part == 1


def test_products_of_all_pairs_cannot_run_in_parts() -> None:
    ex = example()
    step = step_of(ex, Gram(), memory_budget=200_000)
    with pytest.raises(BadArgument, match="a quantity needs all of these 12 samples at once"):
        step(ex.inputs, ex.targets)


@pytest.mark.slow
def test_a_plan_without_room_keeps_less() -> None:
    """Before the batch is cut, trees that hold less are taken."""
    ex = example("gpt")
    free = step_of(ex, ClippedSum(0.1), memory_budget=2**40)
    free(ex.inputs, ex.targets)
    tight = step_of(ex, ClippedSum(0.1), memory_budget=plan_of(free).need - 1)
    tight(ex.inputs, ex.targets)
    assert plan_of(tight).part == B
    assert plan_of(tight).need < plan_of(free).need
    assert plan_of(tight).seconds >= plan_of(free).seconds


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "1GB", float("nan")])
def test_what_is_no_budget(budget: Any) -> None:
    ex = example()
    with pytest.raises(PsgError, match="neither bytes nor a fraction"):
        step_of(ex, Norms(), memory_budget=budget)(ex.inputs, ex.targets)


def test_a_fraction_of_the_memory() -> None:
    ex = example()
    assert step_of(ex, Norms(), memory_budget=0.5)(ex.inputs, ex.targets).norms.shape == (B,)


def test_what_is_asked_of_one_gradient_shares_it() -> None:
    """Where the gradients are formed anyway, every other ask of a wide layer over long sequences reads them."""
    layer, asked = torch.nn.Linear(48, 32), [Grads(), Norms(), ClippedSum(0.1), SecondMoment(), MeanGrad()]
    step = psg_fx.transform(layer, lambda out: out.square().sum(), quantities=asked, backend="eager")
    step(torch.randn(3, 200, 48))
    (weight,) = [p for p in plan_of(step).parameters if p.gradient.name == "weight"]
    formed = weight.parts[0].tree.key
    assert len(weight.parts) == 5
    assert all(formed in part.tree.nodes for part in weight.parts)


def test_rows_of_all_samples_are_counted() -> None:
    """Gradients of every sample do not fit into less than they are."""
    model, x = torch.nn.Linear(64, 32), torch.randn(64, 64)
    whole = 64 * sum(p.numel() for p in model.parameters()) * 4
    step = psg_fx.transform(model, lambda o: o.square().sum(), memory_budget=whole - 1, backend="eager")
    with pytest.raises(BadArgument, match="is too small"):
        step(x)
