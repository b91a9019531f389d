"""What a step says of itself: the plan, the graphs, and the lines of the user's code."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psg_fx
from psg_fx.measure import tree_times

pytestmark = pytest.mark.xdist_group("explain")  # they read one step
ROWS = 5


class Tagger(nn.Module):
    """`[B, 7]` of ids -> `[B, 3]`; the second use of the table ties it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.bound = nn.PReLU()
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layers(self.table(ids))  # a comment that no report repeats
        h = self.bound(h) + h @ self.table.weight.T @ self.table.weight
        return self.head(h.mean(1))


@pytest.fixture(scope="module")
def step() -> psg_fx.PerSampleModule:
    """A step that has been called."""
    made = psg_fx.transform(Tagger(), F.cross_entropy, quantities=psg_fx.ClippedSum(max_norm=1.0), backend="eager")
    made(torch.randint(11, (ROWS, 7)), torch.randint(3, (ROWS,)))
    return made


def test_explain_names_every_parameter_and_source_line(step: psg_fx.PerSampleModule) -> None:
    text = step.explain()
    assert all(re.search(rf"^{re.escape(name)} ", text, re.M) for name, _ in step.named_parameters())
    assert "h = self.layers(self.table(ids))" in text
    assert "a comment" not in text
    assert f"planned for B={ROWS} on cpu" in text


def test_graphs_are_python_with_shapes_in_b(step: psg_fx.PerSampleModule, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in step.graphs:
        text = step.print_graph(stage)
        assert capsys.readouterr().out == text + "\n"
        compile(text, stage, "exec")
        assert "[B, 7]" in text
        assert re.search(r"# test_report\.py:\d+: h = self\.bound\(h\)", text)
        assert "# in the loss" in text
        assert "/" not in text.replace(" / ", "")  # no path of any machine


def test_the_last_graph_names_its_results(step: psg_fx.PerSampleModule) -> None:
    text = step.print_graph()
    assert re.search(r"head_weight_clipped_sum: \"f32\[3, 4\]\" = ", text)


@pytest.mark.parametrize("order", [1, -1])
def test_norms_asked_for_come_before_those_of_a_clipped_sum(order: int) -> None:
    asked = [psg_fx.Norms(squared=True), psg_fx.ClippedSum(max_norm=1.0, per="parameter")][::order]
    made = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, quantities=asked, backend="eager")
    batch = torch.randn(ROWS, 4), torch.randint(3, (ROWS,))
    assert made(*batch).norms.shape == (ROWS,)
    assert made.validate(*batch).ok


def test_a_module_of_torch_is_named_by_its_path() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    made = psg_fx.transform(model, lambda out: out.sum(), backend="eager")
    made(torch.randn(2, 4))
    assert "in 0 (Linear)" in made.explain()


def test_measured_beside_predicted(step: psg_fx.PerSampleModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured time for every tree that is not part of an earlier one, at random operands of every form."""
    as_compiled, in_rounds = tree_times.compiled, tree_times.time_rounds
    monkeypatch.setattr(tree_times, "compiled", lambda run, given, backend: as_compiled(run, given, "eager"))
    short = {"rounds": 1, "min_run_time": 1e-4}
    monkeypatch.setattr(tree_times, "time_rounds", lambda runs, **how: in_rounds(runs, **how | short))
    rows = [line for line in step.explain(measure=True, wide=True).splitlines() if "->" in line]
    assert len(rows) > len(list(step.parameters()))
    assert all(re.search(r"[mµ]s, measured [0-9.]+ [mµ]s", row) for row in rows)
    assert "measured" not in step.explain()


def test_there_is_nothing_to_say_before_the_first_call() -> None:
    made = psg_fx.transform(nn.Linear(2, 1), lambda out: out.sum())
    with pytest.raises(psg_fx.errors.BadArgument, match="call the step once"):
        made.explain()


def test_an_unknown_stage(step: psg_fx.PerSampleModule) -> None:
    with pytest.raises(psg_fx.errors.BadArgument, match="stages are captured, batched"):
        step.print_graph("fused")


@pytest.mark.inductor
def test_a_choice_along_an_axis_of_few() -> None:
    """Where the choice would change is looked for at sizes that the axis may have: one element is none."""
    step = psg_fx.transform(
        nn.Linear(64, 3), lambda o: o.square().sum((1, 2)), quantities=[psg_fx.Norms(), psg_fx.Grads()]
    )
    step(torch.randn(4, 50, 64))
    assert "weight" in step.explain()
