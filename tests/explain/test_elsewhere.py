"""The plan of a step for a device that is not here."""

from __future__ import annotations

import pytest
import torch

import psg_fx
from psg_fx import BadArgument, Norms, cli, zoo
from psg_fx.explain.elsewhere import chosen_otherwise, planned_for
from psg_fx.planner import rates
from psg_fx.planner.plan import PLAN


def step_of(name: str, **sizes: int) -> psg_fx.PerSampleModule:
    ex = zoo.example(name, **sizes)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=Norms(), backend="eager")
    step(ex.inputs, ex.targets)
    return step


def test_it_is_the_plan_that_such_a_device_would_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the step had been planned with that table."""
    sizes = {"batch": 4, "layers": 1, "width": 64, "heads": 2, "tokens": 48, "vocabulary": 50}
    there = planned_for(step_of("gpt", **sizes).graphs["planned"], "H100")
    monkeypatch.setattr(rates, "device", lambda kind, replayed=False: rates.H100)
    wanted = PLAN.of(step_of("gpt", **sizes).graphs["planned"])
    assert there.seconds == wanted.seconds
    assert [str(p.tree) for plan in there.parameters for p in plan.parts] == [
        str(p.tree) for plan in wanted.parameters for p in plan.parts
    ]


def test_what_differs_is_listed() -> None:
    step = step_of("gpt", batch=4, layers=1, width=64, heads=2, tokens=48, vocabulary=50)
    text = step.explain(device="h100")
    assert "on cuda with the shipped table of an H100" in text
    own = PLAN.of(step.graphs["planned"])
    rows = chosen_otherwise(own, planned_for(step.graphs["planned"], "h100"))
    assert rows
    assert all(name in text.split("Chosen otherwise than here")[1] for name, *_ in rows)
    assert "on cpu" in step.explain()  # its own plan is as it was


def test_the_same_table_chooses_the_same() -> None:
    assert "The trees are those that are chosen here." in step_of("mlp").explain(device="cpu")


def test_another_name_is_refused() -> None:
    made = step_of("mlp")
    for device, called in (("tpu", "'tpu'"), (5, "5")):
        with pytest.raises(BadArgument, match=f"no table of rates is called {called}"):
            made.explain(device=device)


def test_a_plan_for_another_device_is_not_timed() -> None:
    with pytest.raises(BadArgument, match="a plan for another device is not timed"):
        step_of("mlp", batch=4).explain(measure=True, device="h100")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "mlp", "--quantity", "norms", "--on", "h100"]) == 0
    assert "Plan for h100" in capsys.readouterr().out
    assert cli.main(["explain", "mlp", "--on", "h100", "--json"]) != 0


def test_no_step_is_changed_by_asking() -> None:
    step = step_of("mlp", batch=3)
    before = [str(node) for node in step.graphs["planned"].graph.nodes]
    step.explain(device="h100")
    assert [str(node) for node in step.graphs["planned"].graph.nodes] == before
    assert torch.isfinite(step(torch.randn(3, 16), torch.zeros(3, dtype=torch.int64)).norms).all()
