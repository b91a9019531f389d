"""Tables of devices that were not measured: their names, how they are scaled, and which the device at hand gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import psg_fx
from psg_fx import Norms, cli, zoo
from psg_fx.explain.elsewhere import planned_for
from psg_fx.planner import rates, sheets
from psg_fx.planner.cost import REPLAYED

PROPERTIES: dict[str, dict[str, Any]] = {
    "h100": {"major": 9, "minor": 0, "multi_processor_count": 132, "clock_rate": 1980000,
             "memory_clock_rate": 2619000, "memory_bus_width": 5120},
    "a100": {"major": 8, "minor": 0, "multi_processor_count": 108, "clock_rate": 1410000,
             "memory_clock_rate": 1593000, "memory_bus_width": 5120},
    "h200": {"major": 9, "minor": 0, "multi_processor_count": 132, "clock_rate": 1980000,
             "memory_clock_rate": 3201000, "memory_bus_width": 6016},
    "l4": {"major": 8, "minor": 9, "multi_processor_count": 58, "clock_rate": 2040000,
           "memory_clock_rate": 6251000, "memory_bus_width": 192},
}  # fmt: skip
"""What `torch.cuda.get_device_properties` says of them, clocks in kHz."""

UNITS = ("fp32", "tf32", "bf16", "fp64", "bandwidth", "cycles")


def properties(of: str, **changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"name": of} | PROPERTIES[of] | changed)


def at_hand(monkeypatch: pytest.MonkeyPatch, called: str, said: object = None) -> None:
    """Pretend that the CUDA device at hand is this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: called)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: said)


@pytest.mark.parametrize("name", sheets.SHEETS)
def test_every_sheet_has_a_table(name: str) -> None:
    table = rates.named(name.upper())
    assert table.name == "cuda"
    assert table.flops.keys() == rates.H100.flops.keys()
    assert table.extra.keys() == rates.H100.extra.keys()
    assert all(sheet.startswith("https://") for sheet in sheets.SHEETS[name].source)


def test_the_h100_scaled_to_itself_is_itself() -> None:
    table = rates.scaled(sheets.H100)
    assert table.flops == pytest.approx(rates.H100.flops)
    assert table.extra == pytest.approx(rates.H100.extra)
    assert table.bandwidth == rates.H100.bandwidth


def test_scaling_foretells_what_was_measured() -> None:
    """Every rate of the H200 but what the host does."""
    scaled, measured = rates.scaled(sheets.SHEETS["h200"]), rates.named("h200")
    assert scaled.flops == pytest.approx(measured.flops, rel=0.15)
    assert scaled.bandwidth == pytest.approx(measured.bandwidth, rel=0.05)
    assert scaled.extra == pytest.approx(measured.extra, rel=0.15)


@pytest.mark.parametrize("name", [name for name in sheets.SHEETS if name not in rates.MEASURED])
def test_every_rate_goes_with_what_bounds_it(name: str) -> None:
    table, sheet = rates.NAMED[name], sheets.SHEETS[name]
    for (kind, dtype), rate in rates.H100.flops.items():
        unit = rates.BOUND_BY[kind][dtype]
        wanted = sheet.attains(unit) / sheets.H100.attains(unit)
        limit = sheet.attains({torch.float32: "tf32", torch.float64: "fp64"}.get(dtype, "bf16"))
        assert table.flops[kind, dtype] in (pytest.approx(rate * wanted), limit)
    assert table.bandwidth / rates.H100.bandwidth == pytest.approx(sheet.bandwidth / sheets.H100.bandwidth)
    assert table.launch == rates.H100.launch
    assert table.replaying().launch == rates.H100.extra[REPLAYED]


@pytest.mark.parametrize("name", sheets.SHEETS)
def test_no_rate_is_above_its_sheet(name: str) -> None:
    table, sheet = rates.NAMED[name], sheets.SHEETS[name]
    peaks = {torch.float32: sheet.fp32, torch.float64: sheet.fp64}
    for (kind, dtype), rate in table.flops.items():
        peak = sheet.tf32 if (kind, dtype) == ("conv", torch.float32) else peaks.get(dtype, sheet.bf16)
        assert rate < peak
    assert table.bandwidth < sheet.bandwidth
    assert all(sheet.attains(unit) <= getattr(sheet, unit) for unit in UNITS)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_device_says_by_its_properties_what_its_sheet_says(name: str) -> None:
    """Matrix units of the H100 run at a lower clock than the one it names."""
    found = sheets.of_properties(properties(name))
    assert found is not None
    for unit in UNITS:
        assert getattr(found, unit) == pytest.approx(getattr(sheets.SHEETS[name], unit), rel=0.09)


@pytest.mark.parametrize("name", sheets.SHEETS)
def test_the_device_at_hand_gets_the_table_of_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for called in sheets.SHEETS[name].called:
        at_hand(monkeypatch, called)
        assert rates.device("cuda") is rates.NAMED[name]


def test_a_device_without_a_sheet_is_scaled_by_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another memory, as in the A100 of 40 GB."""
    at_hand(
        monkeypatch,
        "NVIDIA A100-SXM4-40GB",
        properties("a100", name="NVIDIA A100-SXM4-40GB", memory_clock_rate=1215000),
    )
    table = rates.device("cuda")
    assert table.origin == "the table of an H100 scaled to NVIDIA A100-SXM4-40GB"
    assert table.bandwidth == pytest.approx(3.0e12 * 1.555 / 3.35, rel=0.01)
    assert table.rate("gemm") == pytest.approx(19.5e12 * 5.2e13 / 66.9e12, rel=0.01)


@pytest.mark.parametrize("said", [
    properties("a100", major=7), properties("a100", clock_rate=0), SimpleNamespace(name="x", major=9, minor=0),
])  # fmt: skip
def test_a_device_that_says_too_little_counts_as_an_h100(said: object, monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch, "NVIDIA something", said)
    assert rates.device("cuda") is rates.H100


def test_devices_of_another_maker_count_as_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their compute capability means another thing."""
    at_hand(monkeypatch, "AMD Instinct MI300X", properties("h100"))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert rates.device("cuda") is rates.H100


@pytest.mark.slow
def test_plans_differ_between_devices() -> None:
    """Slow memory and slower float32 products make another tree the cheaper one, and every time longer."""
    ex = zoo.example("gpt", batch=8, layers=1, width=256, heads=4, tokens=128, vocabulary=500)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=Norms(), backend="eager")
    step(ex.inputs, ex.targets)
    plans = {name: planned_for(step.graphs["planned"], name) for name in sheets.SHEETS}
    assert plans["h200"].seconds <= plans["h100"].seconds < plans["a100"].seconds < plans["l4"].seconds
    trees = {n: [str(part.tree) for p in plan.parameters for part in p.parts] for n, plan in plans.items()}
    assert trees["l4"] != trees["h100"]
    assert "with the table of an H100 scaled to an L4" in step.explain(device="l4")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "mlp", "--quantity", "norms", "--on", "l4"]) == 0
    assert "Plan for l4" in capsys.readouterr().out
