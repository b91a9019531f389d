"""Long work shows itself on a terminal, in the log, and in `step.timings`."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr("psg_fx.progress.sys", SimpleNamespace(stderr=found))  # pytest sets sys.stderr anew
    return found


def step_of(backend: str = "eager", **arguments: object) -> psg_fx.PerSampleModule:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return psg_fx.transform(model, F.cross_entropy, backend=backend, **arguments)  # type: ignore[arg-type]


def call(step: psg_fx.PerSampleModule, count: int = 4) -> None:
    step(torch.randn(count, 3), torch.randint(2, (count,)))


def shown(terminal: Terminal) -> list[str]:
    """What the line said, one after the other; "" where it was taken away."""
    return terminal.getvalue().split("\r\033[K")[1:]


def test_every_pass_and_the_compiler_are_named_on_a_terminal(terminal: Terminal) -> None:
    step = step_of("aot_eager")
    call(step)
    lines = shown(terminal)
    named = [line.removeprefix("psg_fx: ").split(" (pass")[0] for line in lines if line]
    passes = [name for name in step.timings if name != "compile"]
    assert named[:-1] == passes
    assert named[-1].startswith("compiling ")
    assert named[-1].endswith(" ops with aot_eager")
    assert lines[-1] == ""


def test_the_line_is_gone_after_an_error(terminal: Terminal) -> None:
    step = psg_fx.transform(nn.BatchNorm1d(3), lambda out: out.sum(1), backend="eager")
    with pytest.raises(psg_fx.SamplesMixed):
        step(torch.randn(4, 3))
    assert shown(terminal)[-2:] == ["psg_fx: batch (pass 2)", ""]


def test_nothing_is_shown_on_demand(terminal: Terminal) -> None:
    call(step_of("aot_eager", progress=False))
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    call(step_of("aot_eager"))
    assert capsys.readouterr() == ("", "")


def test_the_parts_of_a_batch_are_counted(terminal: Terminal) -> None:
    step = psg_fx.transform(nn.Linear(3, 2), F.cross_entropy, quantities=psg_fx.Norms(), backend="eager")
    psg_fx.microbatch(step, 2, progress=True)(torch.randn(5, 3), torch.randint(2, (5,)))
    assert [line for line in shown(terminal) if "parts" in line] == [f"psg_fx: {k} of 3 parts" for k in (1, 2, 3)]
    assert shown(terminal)[-1] == ""


def test_an_empty_text_takes_the_line_away(terminal: Terminal) -> None:
    line = Progress(shown=True)
    with line.doing("something"):
        assert shown(terminal) == ["psg_fx: something"]
    assert shown(terminal)[-1] == ""


def test_the_log_has_one_line_for_the_passes_and_one_for_each_compilation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="psg_fx"):
        call(step_of("aot_eager"))
    passes, compiler = (record.getMessage() for record in caplog.records if record.name == "psg_fx")
    assert passes.startswith("Sequential: captured, planned and lowered in ")
    assert compiler.startswith("compiled ")


def test_timings_have_every_pass_and_all_that_was_compiled() -> None:
    step = step_of("aot_eager")
    call(step)
    first = step.timings
    assert list(first) == [
        "capture", "batch", "unreduce", "sites", "differentiate", "networks", "merge", "plan", "lower", "tidy",
        "picks", "statistics", "totals", "widen", "beside", "separate", "compile",
    ]  # fmt: skip
    assert all(seconds >= 0 for seconds in first.values())
    call(step)
    assert step.timings == first
    call(step, count=6)  # another batch size is compiled once more, dynamically
    assert step.timings["compile"] > first["compile"]
    assert {name: s for name, s in step.timings.items() if name != "compile"} == {
        name: s for name, s in first.items() if name != "compile"
    }


def test_both_halves_of_a_step_without_a_loss_are_timed() -> None:
    model = nn.Linear(3, 2)
    step = psg_fx.transform(model, backend="aot_eager")
    out = step(torch.randn(4, 3))
    forward = step.timings["compile"]
    out.sum().backward()
    assert step.timings["compile"] > forward
