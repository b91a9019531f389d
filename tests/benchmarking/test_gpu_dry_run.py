"""What `make gpu` runs, on a stand-in for the device: every line up to the kernels themselves."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import psg_fx
from psg_fx import cli
from psg_fx.benchmarking.benchmark import record_work
from psg_fx.benchmarking.contenders import field_of, psg
from psg_fx.benchmarking.problem import Problem
from psg_fx.benchmarking.report import BenchmarkReport, BenchmarkRow
from psg_fx.measure import calibrate, clock, device_work
from psg_fx.planner import rates
from psg_fx.quantities.names import USUAL
from support.stand_in import NAME, stand_in

ROOT = Path(__file__).resolve().parents[2]
TAG = "cuda-nvidia-stand-in"

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="a build for CUDA asks for its driver"
)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where results and tables go; scripts can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import _results

    monkeypatch.setattr(_results, "RESULTS", tmp_path)
    monkeypatch.setattr(rates, "folder", lambda: tmp_path / "tables")
    monkeypatch.setattr(clock, "median_seconds", lambda run, total: run() or 1e-3)
    monkeypatch.setattr(calibrate, "median_seconds", lambda run, total: run() or 1e-3)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return tmp_path


def told(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *words])


def test_calibration(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rate of the shipped table is measured, in graphs that are replayed, and read by steps built later."""
    with stand_in(monkeypatch, "meta"):
        table = psg_fx.calibrate("cuda")
        assert rates.device("cuda") == table
        assert rates.table_path("cuda").name.startswith("cuda-nvidia-stand-in-torch")
    assert table.flops.keys() == rates.H100.flops.keys()
    assert table.extra.keys() == rates.H100.extra.keys()
    assert table.rate("gemm") == pytest.approx(2 * 4096**3 * 20 / 1e-3)  # twenty runs a replay
    assert table.rate("gemm", torch.float16) == table.rate("gemm", torch.bfloat16)
    assert table.bandwidth > 0


def test_the_command_calibrates(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(monkeypatch, "meta"):
        assert cli.main(["calibrate", "--device", "cuda"]) == 0
    assert "cuda-nvidia-stand-in" in capsys.readouterr().out


def test_the_part_of_rates(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench/calibrate.py`, every layer and every way."""
    import calibrate as script

    told(monkeypatch, "--device", "cuda", "--tag", TAG)
    with stand_in(monkeypatch, "meta"):
        script.main()
    found = json.loads((place / f"calibrate-{TAG}.json").read_text())
    assert found["environment"]["gpu"] == NAME
    assert all(len(ways) == 5 for ways in found["convolutions_ms"].values())


class Profile:
    """As torch's profiler: what was recorded launched ten kernels of a millisecond, one every two milliseconds."""

    def __init__(self, activities: object) -> None:
        self.steps = 0

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> list[Any]:
        kind = torch.autograd.DeviceType.CUDA
        ranges = [SimpleNamespace(start=2e3 * k, end=2e3 * k + 1e3) for k in range(10)]
        return [SimpleNamespace(device_type=kind, name="kernel", device_time=1e3, time_range=r) for r in ranges]


@pytest.fixture
def kernels(place: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import kernels

    monkeypatch.setattr(device_work, "profile", Profile)
    monkeypatch.setattr(kernels, "Problem", partial(Problem, backend="eager"))
    monkeypatch.setattr(torch, "autocast", lambda *_: contextlib.nullcontext())
    mlp = kernels.Run("MLP", "mlp", 4, autocast=torch.bfloat16)
    monkeypatch.setattr(kernels, "RUNS", {"mlp": mlp})
    monkeypatch.setattr(kernels, "psg", lambda *given, **how: psg(*given, **(how | {"mode": None, "reuse": False})))
    monkeypatch.setattr(kernels, "ordinary_compiled", lambda problem, mode: kernels.ordinary_one_graph(problem))
    return kernels


@pytest.mark.slow
def test_the_part_of_kernels(kernels: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, "--tag", TAG, "--models", "mlp")
    with stand_in(monkeypatch, "cpu"):
        assert kernels.main() == 0
    found = json.loads((place / f"kernels-{TAG}.json").read_text())["models"]["mlp"]
    assert found["norms"]["kernels"] == 2
    assert found["norms"]["device_ms"] == pytest.approx(2.0)
    assert found["norms"]["idle_ms"] == pytest.approx(9 / 5)
    assert found["norms"]["pauses"] == [{"before": "kernel", "after": "kernel", "ms": pytest.approx(9 / 5)}]
    assert found.keys() > {"replayed ordinary", "replayed clipped_sum by all kernels", "grads"}
    assert "## MLP" in (place / f"kernels-{TAG}.md").read_text()


def test_kernels_of_models_that_prepare_side_by_side(
    kernels: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process of one model: what is not begun in time is left out."""
    (place / "mlp.go").touch()
    told(monkeypatch, "--one", "mlp", "--json", str(place / "mlp.json"), "--turns", str(place), "--until", "0")
    with stand_in(monkeypatch, "cpu"):
        assert kernels.main() == 0
    assert json.loads((place / "mlp.json").read_text()) == {}
    assert (place / "mlp.ready").exists()
    assert kernels.pages({"mlp": {"failure": "why"}}) == ["## MLP", "why"]
    assert "| norms  | why " in kernels.pages({"mlp": {"norms": {"failure": "why"}}})[1]


def test_steps_are_chosen_by_name(kernels: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, "--models", "mlp", "--tag", TAG, "--steps", "ordinary,*clipped_sum")
    with stand_in(monkeypatch, "cpu"):
        assert kernels.main() == 0
    found = json.loads((place / f"kernels-{TAG}.json").read_text())["models"]["mlp"]
    assert list(found) == ["ordinary", "clipped_sum", "replayed clipped_sum"]


PROFILED = """==PROF== Connected
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","byte","byte","ns"
"0","spin_kernel(long)","0","0","1,000"
"1","gemm","3,000,000","1,000,000","2,000,000"
"2","spin_kernel(long)","0","0","1,000"
"3","gemm","1,000,000","1,000,000","500,000"
"4","triton_red","2,000,000","0","500,000"
"""


def test_the_part_of_bytes(kernels: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the profiler belong to the step that a separator was launched before."""
    import moved

    ended = SimpleNamespace(returncode=0, stdout=PROFILED, stderr="")
    monkeypatch.setattr(moved, "RUNS", kernels.RUNS)
    monkeypatch.setattr(moved.subprocess, "run", lambda *_, **__: ended)
    told(monkeypatch, "--tag", TAG, "--models", "mlp")
    with stand_in(monkeypatch, "cpu"):
        assert moved.main() == 0
    found = json.loads((place / f"moved-{TAG}.json").read_text())["models"]["mlp"]
    assert found["ordinary"] == {"read_mb": 3.0, "written_mb": 1.0, "kernels": 1, "device_ms": 2.0}
    assert found["grads"] == {"read_mb": 3.0, "written_mb": 1.0, "kernels": 2, "device_ms": 1.0}
    assert "| grads    | 3         | 1            | 1.00 " in (place / f"moved-{TAG}.md").read_text()


def test_the_part_of_gram_dots(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gram_dots

    ran: list[torch.Tensor] = []
    monkeypatch.setattr(gram_dots, "SHAPES", ((3, 5, 4, 6), (2, 70, 8, 3)))
    monkeypatch.setattr(gram_dots, "seconds", lambda run, device: ran.append(run()) or 2e-6)
    product = torch.bmm  # a CPU has none of bfloat16 into float32
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype=None: product(a.float(), b.float()))
    told(monkeypatch, "--tag", TAG)
    with stand_in(monkeypatch, "cpu"):
        assert gram_dots.main() == 0
    first, second = json.loads((place / f"gram_dots-{TAG}.json").read_text())["rows"]
    assert (first["samples"], second["positions"]) == (3, 70)
    assert max(row[f"{way}_error"] for row in (first, second) for way in ("products", "kernel")) < 1e-5
    assert [value.shape for value in ran] == [(3,), (3,), (2,), (2,)]
    assert "| 2" in (place / f"gram_dots-{TAG}.md").read_text()


def test_the_part_of_weighted_sums(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weighted_sums

    monkeypatch.setattr(weighted_sums, "SHAPES", ((3, 50, 2, torch.bfloat16), (2, 70, 1, torch.float32)))
    monkeypatch.setattr(weighted_sums, "seconds", lambda run, device: run() and 2e-6)
    told(monkeypatch, "--tag", TAG)
    with stand_in(monkeypatch, "cpu"):
        assert weighted_sums.main() == 0
    rows = json.loads((place / f"weighted_sums-{TAG}.json").read_text())["rows"]
    assert [row["samples"] for row in rows] == [3, 2]
    assert max(row["error"] for row in rows) < 1e-6
    assert weighted_sums.rate(rows[0], "kernel") == pytest.approx((2 * 3 * 50 * 2 + 2 * 50 * 4) / 2e-6 / 1e12)


def test_every_contender_of_the_race_is_known(place: Path) -> None:
    import compare

    labels = [c.label for c in field_of(tuple(USUAL), compare.CONTENDERS["cuda"])]
    assert {"replayed-ordinary", "replayed-psg/clipped_sum", "opacus-ghost/norms"} <= set(labels)
    for run in compare.RUNS.values():
        assert run.where


def test_the_race_on_the_device(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model of the last part, in the process that it would have."""
    import compare

    monkeypatch.setitem(compare.RUNS, "mlp", compare.Run("MLP", "mlp", 4, where=("cuda",)))
    monkeypatch.setattr(compare, "benchmark", partial(compare.benchmark, backend="eager"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    args = argparse.Namespace(one="mlp", device="cuda", contenders="ordinary-eager,psg-eager/clipped_sum", quick=True,
                              seconds=0.1, first=None, turns=None, until=None, json=place / "mlp.json")  # fmt: skip
    with stand_in(monkeypatch, "cpu"):
        compare.run_one(args)
    report = json.loads(args.json.read_text())
    assert not [row for row in report["rows"] if row["failure"]]
    assert "launches" not in compare.read(report).to_markdown()
    assert compare.ratio_table({"mlp": report}, "simple")


def test_pauses_are_between_kernels_that_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, times = torch.autograd.DeviceType.CUDA, {"a": (0, 5), "b": (2, 3), "c": (7, 8), "d": (8, 9)}
    seen = [
        SimpleNamespace(device_type=kind, name=name, device_time=1.0, time_range=SimpleNamespace(start=start, end=end))
        for name, (start, end) in reversed(times.items())
    ]
    monkeypatch.setattr(device_work, "profile", Profile)
    monkeypatch.setattr(Profile, "events", lambda self: seen)
    with stand_in(monkeypatch, "cpu"):
        found = device_work.device_work(dict, calls=1)
    assert found.pauses == (device_work.Pause("a", "c", pytest.approx(2e-6)),)


def test_rows_say_what_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_work, "profile", Profile)
    rows = {"psg": BenchmarkRow("psg", "norms"), "failed": BenchmarkRow("failed", "norms", failure="why")}
    with stand_in(monkeypatch, "cpu"):
        record_work({"psg": dict, "failed": dict}, rows, {"failed": ValueError()})
    assert rows["psg"].kernels == (device_work.Kernel("kernel", pytest.approx(0.01 / 3), 10 / 3),)
    assert (rows["psg"].device_s, rows["psg"].launches) == (pytest.approx(0.01 / 3), 10 / 3)
    told = BenchmarkReport(list(rows.values()), {}, {}).to_markdown().splitlines()
    assert [cell.strip() for cell in told[0].split("|")[6:8]] == ["device ms", "launches"]
    assert [cell.strip() for cell in told[2].split("|")[6:8]] == ["3.33", "3"]
    assert [cell.strip() for cell in told[3].split("|")[6:8]] == ["-", "-"]


@pytest.mark.inductor
@pytest.mark.rest  # three processes, one of which compiles
def test_models_that_prepare_side_by_side_take_turns(place: Path) -> None:
    """Processes of their own, on the CPU: a first call of what is compiled, and then the race."""
    import compare

    args = argparse.Namespace(device="cpu", seconds=0.1, contenders="ordinary-eager,ordinary-one-graph", quick=True)
    labels = compare.worth_compiling(args)
    assert labels == ["ordinary-one-graph"]
    ((name, report),) = compare.together({"simplecnn": labels}, partial(compare.command, args), 330.0)
    assert name == "simplecnn"
    assert [row["contender"] for row in report["rows"]] == ["ordinary-eager", "ordinary-one-graph"]
    assert [row["first_call_s"] is None for row in report["rows"]] == [True, False]
    assert all(row["median_s"] for row in report["rows"])


def test_memory_is_that_of_the_allocator(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch, "cpu"):
        assert clock.peak_memory(lambda: torch.zeros(3, device="cuda"), torch.device("cuda")) == 200
        clock.give_back(torch.device("cuda"))


def test_the_script_runs_its_parts_and_passes_over_what_is_there(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that is stopped at its limit fails the script, and the others run all the same."""
    import gpu

    ran = []

    def limited(part: str, words: list[str], environment: dict[str, str], out: object = None) -> str:
        ran.append(part)
        return "stopped at its limit of 1 s" if part == "kernels" else "done"

    monkeypatch.setattr(gpu, "RESULTS", place)
    monkeypatch.setattr(gpu, "limited", limited)
    (place / f"calibrate-{TAG}.json").write_text("{}")
    told(monkeypatch)
    with stand_in(monkeypatch, "cpu"):
        assert gpu.main() == 1
    assert ran == ["tests", "kernels", "weighted_sums", "gram_dots", "moved", "compare"]
    assert (place / f"tests-{TAG}.txt").exists()
    said = capsys.readouterr().out
    assert f"calibrate: {place / f'calibrate-{TAG}.json'} is there" in said
    assert "kernels: stopped" in said
