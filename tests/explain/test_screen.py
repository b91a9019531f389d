"""explain() in 120 columns: layers that are alike share a row, and a memory budget says what it did."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import ClippedSum, Gram, Norms, zoo
from psg_fx.explain.screen import WIDTH
from psg_fx.planner.plan import PLAN

pytestmark = pytest.mark.xdist_group("screen")  # they read one step of a transformer

SMALL = {"batch": 3, "layers": 3, "width": 16, "heads": 2, "tokens": 10, "vocabulary": 11}
SMALL_CNN = {"batch": 3, "image": 8, "width": 3, "hidden": 7, "classes": 4}


def made(name: str, sizes: dict[str, int], **options: object) -> psg_fx.PerSampleModule:
    ex = zoo.example(name, **sizes)
    asked = [Norms(per="parameter"), ClippedSum(1.0), Gram()]
    step = psg_fx.transform(
        ex.model,
        ex.loss_fn,
        quantities=asked,
        batch_dim=ex.batch_dim,
        backend="eager",
        **options,  # type: ignore[arg-type]
    )
    step(ex.inputs, ex.targets)
    return step


@pytest.fixture(scope="module")
def gpt() -> psg_fx.PerSampleModule:
    return made("gpt", SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "h100"])
def test_it_fits(gpt: psg_fx.PerSampleModule, device: str | None) -> None:
    assert max(map(len, gpt.explain(device=device).splitlines())) <= WIDTH


def test_long_names_and_notes_fit() -> None:
    inner: nn.Module = nn.Linear(4, 4)
    for _ in range(12):
        inner = nn.Sequential(nn.Sequential(inner))
    step = psg_fx.transform(inner, lambda out: out.sum(), quantities=Norms(), backend="eager")
    step(torch.randn(2, 4))
    lines = step.explain().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any("…" in line for line in lines)


def test_layers_that_are_alike_share_rows(gpt: psg_fx.PerSampleModule) -> None:
    text = gpt.explain()
    (row,) = [line for line in text.splitlines() if line.startswith("blocks.0…2.up.weight")]
    assert "3× " in row
    assert "blocks.1.up.weight" not in text
    assert "linear, … (3×)" in text
    wide = gpt.explain(wide=True)
    assert all(name in wide for name, _ in gpt.named_parameters())


def test_no_parameter_is_missing(gpt: psg_fx.PerSampleModule) -> None:
    """Of the parameters each is in a row, counted by the factors of the rows."""
    section = gpt.explain().split("Plan:")[1].split("-----\n", 1)[1].split("\n\n")[0]
    firsts = [line for line in section.splitlines() if line and not line.startswith(" ")]
    counts = [int(line.split("× ")[0].rsplit(" ", 1)[-1]) if "× " in line else 1 for line in firsts]
    assert sum(counts) == len(list(gpt.parameters()))


def test_layers_that_differ_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    step = psg_fx.transform(model, lambda out: out.sum(), quantities=Norms(), backend="eager")
    step(torch.randn(2, 4))
    rows = [line.split()[0] for line in step.explain().split("Plan:")[1].splitlines() if ".weight" in line]
    assert rows == ["{0,1}.weight", "2.weight"]


@pytest.mark.slow
def test_a_budget_says_what_it_did(gpt: psg_fx.PerSampleModule) -> None:
    assert "memory budget" not in gpt.explain()
    roomy = made("simplecnn", SMALL_CNN, memory_budget=10**9).explain()
    assert "A memory budget holds" in roomy
    assert "No tree is another one" in roomy
    with pytest.raises(psg_fx.BadArgument) as refused:
        made("simplecnn", SMALL_CNN, memory_budget=1)
    least = int(refused.value.fix.split("memory_budget=")[1].split(",")[0])
    tight = made("simplecnn", SMALL_CNN, memory_budget=least).explain()
    roomy_need = roomy.split("A memory budget holds: ")[1].split(" at once")[0]
    assert f"({roomy_need} without it)" in " ".join(tight.split())
    assert max(map(len, tight.splitlines())) <= WIDTH


def test_a_faster_way_that_was_not_taken_is_explained(gpt: psg_fx.PerSampleModule) -> None:
    told = "An instead may be faster by itself and slower in all"
    plan = PLAN.of(gpt.graphs["planned"])
    parts = [part for parameter in plan.parameters for part in parameter.parts]
    assert any(seconds < 0.9 * part.seconds for part in parts for _, seconds in part.alternatives)
    assert told in gpt.explain()
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    step(torch.randn(2, 4), torch.tensor([0, 1]))
    assert told not in step.explain()


def test_what_is_asked_stays_within_120_columns() -> None:
    quantities = [
        psg_fx.ClippedSum(1.0), psg_fx.Gram(), psg_fx.Projection(2), psg_fx.SecondMoment(centered=True),
        psg_fx.Grads(), psg_fx.Norms(), psg_fx.MeanGrad(), psg_fx.WeightedSum(),
    ]  # fmt: skip
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=quantities, backend="eager")
    step(torch.zeros(5, 4), torch.tensor([0, 1, 2, 1, 0]), weights=torch.ones(5))
    lines = step.explain().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("asked: "))
    assert lines[first + 1].startswith(" " * 7)
    assert max(map(len, lines)) <= 120
