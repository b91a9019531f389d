"""Measured tables: written once when asked, read by steps that are built later, and nothing is measured unasked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psg_fx
from psg_fx import cli
from psg_fx.measure import calibrate
from psg_fx.planner import rates


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of this test's own, and a clock that says one millisecond without running much."""
    monkeypatch.setattr(rates, "folder", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "seconds", lambda run, device, total=0.0: 1e-3)
    return tmp_path


def test_a_measured_table_is_read_again(quick: Path) -> None:
    assert rates.device("cpu") is rates.CPU
    table = psg_fx.calibrate("cpu")
    assert rates.device("cpu") == table
    assert table.flops["gemm", torch.float32] == pytest.approx(2 * 768**3 / 1e-3)
    assert table.origin.startswith("rates measured 20")
    assert {dtype for _, dtype in table.flops} >= {torch.float32, torch.float64}
    assert table.extra.keys() == rates.CPU.extra.keys()
    assert rates.device("cuda") is rates.H100


def test_another_number_of_threads_is_another_table(quick: Path) -> None:
    psg_fx.calibrate("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert rates.device("cpu") is rates.CPU
    finally:
        torch.set_num_threads(threads)
    assert rates.device("cpu") is not rates.CPU


@pytest.mark.inductor
def test_every_rate_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample runs: none is dropped because its code is wrong."""

    def run_once(run: object, device: torch.device, total: float = 0.0) -> float:
        assert callable(run)
        run()
        return 1e-3

    monkeypatch.setattr(calibrate, "seconds", run_once)
    where = torch.device("cpu")
    found = calibrate.measured_rates(where) | calibrate._fused(where)
    kinds = {kind for kind, dtype in found if dtype is torch.float32}
    assert kinds == {kind for kind, _ in rates.CPU.flops}


def test_a_step_says_which_table_it_used(quick: Path) -> None:
    def explained() -> str:
        step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, backend="eager")
        step(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))
        return step.explain()

    assert "with the shipped table" in explained()
    psg_fx.calibrate("cpu")
    assert "with rates measured 20" in explained()


def test_the_command(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate"]) == 0
    out = capsys.readouterr().out
    assert str(quick) in out
    head, _, *rows = out.splitlines()
    assert re.fullmatch(r"of +rates measured \d{4}-\d\d-\d\d +the shipped table", head.rstrip())
    assert [row for row in rows if re.fullmatch(r"gemm float32 +[\d.e+]+ Gflop/s +170 Gflop/s", row.rstrip())]
    assert max(map(len, rows[:-1])) <= 120
    assert rates.table_path("cpu").exists()
    assert [path.suffix for path in rates.folder().iterdir()] == [".json"]


@pytest.mark.parametrize("text", ["", '{"name": "cpu", "flops', "[]", '{"name": "cpu", "flops": [], "what": 1}'])
def test_a_table_that_cannot_be_read_is_named(text: str, quick: Path) -> None:
    path = rates.table_path("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, backend="eager")
    with pytest.warns(UserWarning, match=re.escape(f"{path} cannot be read, so the shipped rates are used")):
        step(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))


def test_a_step_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measured_rates", lambda device: pytest.fail("measured unasked"))
    step = psg_fx.transform(nn.Linear(4, 3), F.cross_entropy, backend="eager")
    step(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))


def test_rates_by_dtype() -> None:
    table = replace(rates.CPU, flops={("gemm", torch.float32): 8.0, ("pointwise", torch.float32): 2.0,
                                     ("gemm", torch.bfloat16): 16.0})  # fmt: skip
    assert table.rate("gemm", torch.bfloat16) == 16.0
    assert table.rate("gemm", torch.float64) == 4.0
    assert table.rate("bmm", torch.float32) == 2.0
