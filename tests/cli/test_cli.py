"""The command line: what each command prints, and its exit codes."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import psg_fx
from psg_fx import cli, zoo
from psg_fx.benchmarking.problem import Problem
from psg_fx.cli import commands, load, quantities
from psg_fx.cli.usage import UsageError
from psg_fx.graph.stages import Stage
from psg_fx.quantities.names import KINDS
from psg_fx.reference.validate import ValidationReport, ValidationRow

BENCH = ["bench", "mlp", "--batch", "2", "--backend", "eager", "--seconds", "0.01", "--rounds", "1"]
FACTORIES = """
import torch
import torch.nn.functional as F
from torch import nn

print("the module prints")

def tiny():
    print("the factory prints")
    return nn.Linear(3, 2), F.cross_entropy, torch.randn(4, 3), torch.randint(2, (4,))

def plain():
    return tiny()

def sized(batch=2):
    return nn.Linear(3, 2), F.cross_entropy, torch.randn(batch, 3), torch.randint(2, (batch,))

def transposed():
    return nn.Linear(3, 2), lambda z, y: z.sum(), torch.randn(4, 3), torch.randint(2, (4,)), 0

def raises():
    raise ValueError("no data\\nand more")

def three():
    return 1, 2, 3

def nothing():
    pass

def needs(size):
    pass

def no_model():
    return F.relu, F.cross_entropy, torch.randn(4, 3), None

def no_loss():
    return nn.Linear(3, 2), None, torch.randn(4, 3), None

def exits():
    raise SystemExit(3)

def frozen():
    return nn.Linear(3, 2).requires_grad_(False), F.cross_entropy, torch.randn(4, 3), torch.randint(2, (4,))

def other_classes():
    return nn.Linear(3, 2), F.cross_entropy, torch.randn(4, 3), torch.full((4,), 7)

def mixes():
    return nn.BatchNorm1d(3), F.cross_entropy, torch.randn(4, 3), torch.randint(3, (4,))
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    (tmp_path / "cli_factories.py").write_text(FACTORIES)
    (tmp_path / "cli_broken.py").write_text("import no_such_module_either\n")
    (tmp_path / "cli_no_python.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("cli_factories", "cli_broken", "cli_no_python"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "cli_factories"


def test_help_names_commands_quantities_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    words = ["bench", "explain", "validate", "report", "graph", "calibrate", "MODULE:FACTORY", *zoo.names(), *KINDS]
    assert [w for w in words if w not in text] == []


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: psg-fx")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith(f"psg-fx {psg_fx.__version__}, torch ")


@pytest.mark.parametrize("command", ["explain", "validate", "bench", "report", "graph"])
def test_examples_of_the_help_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [line.removeprefix("psg-fx ").split(" > ")[0] for line in lines if line.startswith("psg-fx ")]
    assert examples
    for example in examples:
        args = cli.build_parser().parse_args(shlex.split(example))
        assert quantities.parsed(args.quantity)


def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BENCH, "--contenders", "ordinary-eager,loop/grads"]) == 0
    text = capsys.readouterr().out
    assert "ordinary-eager" in text
    assert "loop" in text
    assert "vmap " not in text


def test_bench_takes_every_quantity(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["gram", "clipped_sum(max_norm=0.5)", "projection(rank=3)"]
    options = [part for text in asked for part in ("--quantity", text)]
    assert cli.main([*BENCH, "--json", "--contenders", "psg-eager,vmap/gram", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["contender"], r["quantity"]) for r in rows] == [
        ("vmap", "gram"), ("psg-eager", "gram"), ("psg-eager", asked[1]), ("psg-eager", asked[2])
    ]  # fmt: skip
    assert [r["failure"] for r in rows] == [None] * 4
    assert all(r["error"] is not None for r in rows)


@pytest.mark.parametrize(
    "command",
    [
        ["explain"],
        ["validate", "--backend", "eager"],
        ["graph"],
        ["graph", "--stages"],
        ["bench", "--contenders", "psg-eager", "--seconds", "0.01", "--rounds", "1"],
    ],
)
def test_json_is_all_that_is_printed(command: list[str], factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command[0], f"{factories}:tiny", *command[1:], "--quantity", "weighted_sum", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert "the factory prints" in printed.err
    assert "weights: 1 for every sample" in printed.err


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "mlp", "--batch", "5", "--quantity", "norms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["asked"], found["device"]) == (5, ["‖g[b]‖²"], "cpu")
    assert [site["parameters"] for site in found["sites"]] == [[f"fc{k}.weight", f"fc{k}.bias"] for k in (1, 2, 3)]
    assert found["sites"][0]["output"] == ["B", 32]
    row = next(r for r in found["plan"] if r["parameter"] == "fc2.weight")
    assert row["shape"] == [32, 32]
    assert 0 < row["seconds"] <= found["seconds"]
    assert row["flops"] > 0
    assert row["peak_bytes"] > 0


def test_graph_prints_one_stage(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["graph", "mlp", "--quantity", "norms"]
    assert cli.main([*ask, "--stage", "captured"]) == 0
    captured = capsys.readouterr().out
    assert "torch.ops.aten.tanh" in captured
    assert "tanh_backward" not in captured
    assert cli.main(ask) == 0
    assert len(capsys.readouterr().out) > len(captured)
    assert cli.main([*ask, "--stages", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)
    assert [s["stage"] for s in stages] == [s.value for s in Stage]
    assert cli.main([*ask, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stage"] == "tidied"
    assert len(found["nodes"]) == stages[-1]["nodes"]
    names = {node["name"] for node in found["nodes"]}
    assert all(set(node["inputs"]) <= names for node in found["nodes"])


def test_report_is_written_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "mlp", "--quantity", "norms"]) == 0
    assert capsys.readouterr().out == "wrote report.html\n"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert cli.main(["report", "mlp", "--quantity", "norms", "--out", "nowhere/page.html"]) == 2
    assert capsys.readouterr().err == "psg-fx: --out nowhere/page.html: No such file or directory\n"


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("WRONG", 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_validate_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verdict: str, code: int, options: list[str]
) -> None:
    report = ValidationReport([ValidationRow("w", float("inf"), 1, verdict)], 1e-3, "")
    step = SimpleNamespace(validate=lambda *batch, **options: report)
    ex = zoo.example("mlp")
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets)
    monkeypatch.setattr(commands, "made", lambda *args, **options: (step, problem, {}))
    assert cli.main(["validate", "mlp", *options]) == code
    if options:
        found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (found["ok"], found["rows"][0]["max_error"]) == (verdict == "ok", None)


def test_a_refusal_is_printed_whole(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{factories}:mixes"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    refusal = printed.err[printed.err.index("aten.") :].splitlines()
    assert refusal[0].endswith("mixes samples, so per-sample gradients do not exist")
    assert [line.split()[0] for line in refusal[1:]] == ["where", "why", "fix"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("frozen", "no parameter is asked for"), ("other_classes", "Target 7 is out of bounds"),
        ("mixes", "mixes samples, so per-sample gradients do not exist"),
    ],
)  # fmt: skip
def test_bench_says_what_a_step_says(name: str, text: str, factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", f"{factories}:{name}", "--backend", "eager"]) == 1
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nope"], "no example is called 'nope'"),
        (["explain", "nope"], "or name your own as MODULE:FACTORY"),
        (["explain", "mlp", "--set", "depth=3"], "mlp has no size called 'depth'"),
        (["explain", "mlp", "--set", "depth"], "--set needs KEY=VALUE"),
        (["explain", "mlp", "--quantity", "gradients"], "there is no quantity 'gradients'; there are grads, norms"),
        (["explain", "mlp", "--quantity", "norms(p=1)"], "norms has no argument 'p'; it has per, squared"),
        (["explain", "mlp", "--quantity", "grads(p=1)"], "grads has no argument 'p'; it takes none"),
        (["explain", "mlp", "--quantity", "norms(1)"], "not a name with keyword arguments"),
        (["explain", "mlp", "--quantity", "norms(per=print())"], "not a name with keyword arguments"),
        (["explain", "mlp", "--quantity", "norms("], "not a name with keyword arguments"),
        (["explain", "mlp", "--quantity", "clipped_sum(max_norm=-1)"], "max_norm=-1 is not a bound on norms"),
        (["explain", "mlp", "--quantity", "clipped_sum(per='model')"], "clipped_sum needs max_norm"),
        (["explain", "mlp", "--quantity", "gram", "--quantity", "gram( )"], "two quantities fill out.gram"),
        (["explain", "mlp", "--device", "nonsense"], "nonsense"),
        (["explain", "mlp", "--backend", "nonsense"], "backend='nonsense' is unknown"),
        (["bench", "mlp", "--contenders", "psg_fx"], "no contender matches 'psg_fx'"),
        (["explain", "no_such_module:make"], "there is no module 'no_such_module'"),
        (["explain", "json.nowhere.at_all:make"], "there is no module 'json.nowhere'"),
        (["explain", "json:dumsp"], "module json has no 'dumsp'; did you mean dump?"),
        (["explain", ":make"], "is not of the form MODULE:FACTORY"),
        (["explain", "./my_models.py:tiny"], "of a file in the current folder, give my_models:tiny"),
        (["explain", "json:dumps"], "must be callable with no arguments"),
        (["explain", "sys:maxsize"], "is no function, but of type int"),
        (
            ["explain", "builtins:dict"],
            "returned a dict; it must return (model, loss_fn, inputs, targets[, batch_dim])",
        ),
        (["explain", "builtins:dict", "--set", "b=3"], "are for examples of the zoo"),
        (["explain", "cli_factories:plain", "--batch", "3"], "must be callable with batch=N"),
        (["explain", "cli_factories:raises"], "cli_factories:raises raised ValueError: no data (cli_factories.py:22)"),
        (["bench", "cli_factories:exits"], "cli_factories:exits raised SystemExit: 3"),
        (["explain", "cli_factories:three"], "returned 3 values; it must return (model, loss_fn, inputs, targets"),
        (["explain", "cli_factories:nothing"], "returned a NoneType; it must return"),
        (["explain", "cli_factories:needs"], "must be callable with no arguments: missing a required argument"),
        (["explain", "cli_factories:no_model"], "returned a function as model, not a torch.nn.Module"),
        (["explain", "cli_factories:no_loss"], "returned a NoneType as loss_fn, not a function"),
        (["explain", "cli_broken:f"], "importing cli_broken raised ModuleNotFoundError: No module named 'no_such_mod"),
        (["explain", "cli_no_python:f"], "importing cli_no_python raised SyntaxError: invalid syntax"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert [line for line in printed.err.splitlines() if line.startswith("psg-fx: ")] == printed.err.splitlines()[-1:]
    assert printed.out == ""


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--batch=0", "must be a whole number, at least 1, got 0"),
        ("--threads=-1", "must be a whole number, at least 1, got -1"),
        ("--threads=many", "must be a whole number, at least 1, got many"),
        ("--threads=99999", "on this machine, got 99999"),
        ("--stage=nowhere", "invalid choice: 'nowhere'"),
    ],
)
def test_argparse_refuses(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["graph", "mlp", option])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["inf", "nan", "0"])
def test_seconds_are_finite(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "mlp", "--seconds", seconds])
    assert ended.value.code == 2
    assert f"must be a finite number above 0, got {seconds}" in capsys.readouterr().err


def test_output_in_an_encoding_without_its_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["explain", "mlp", "--batch", "2", "--backend", "eager"]) == 0
    assert b"\\u" in written.getvalue()


def test_a_factory_in_the_current_folder(factories: str) -> None:
    assert load.from_factory(f"{factories}:tiny").targets.shape == (4,)
    assert load.from_factory(f"{factories}:transposed").batch_dim == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("norms", psg_fx.Norms()),
        (" norms( ) ", psg_fx.Norms()),
        ('norms(per="parameter", squared=True)', psg_fx.Norms(per="parameter", squared=True)),
        ("clipped_sum", psg_fx.ClippedSum(max_norm=1.0)),
        ("clipped_sum(max_norm=0.5)", psg_fx.ClippedSum(max_norm=0.5)),
        ("projection(rank=4)", psg_fx.Projection(rank=4)),
        ("second_moment(centered=True)", psg_fx.SecondMoment(centered=True)),
    ],
)
def test_quantities_are_written_as_in_python(text: str, expected: psg_fx.Quantity) -> None:
    assert quantities.quantity(text) == expected


def test_nothing_of_a_quantity_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    with pytest.raises(UsageError):
        quantities.quantity(f"norms(per=open({str(mark)!r}, 'w'))")
    assert not mark.exists()


def test_values_that_a_step_reads_are_made_up() -> None:
    ex = zoo.example("mlp", 3)
    problem = Problem(ex.model, ex.loss_fn, ex.inputs, ex.targets)
    asked = [psg_fx.WeightedSum(), psg_fx.Dots(count=2), psg_fx.ClippedSum(max_norm=1.0, weighted=True)]
    values, notes = quantities.given(asked, problem)
    assert values["weights"].tolist() == [1.0] * 3
    assert values["directions"]["fc1.weight"].shape == (2, 32, 16)
    assert len(notes) == 2
    assert quantities.given([psg_fx.Norms(), psg_fx.ClippedSum(max_norm=1.0)], problem) == ({}, [])


@pytest.mark.rest  # a process of its own that captures a GPT
def test_a_reader_that_goes_away_is_no_error() -> None:
    """The graph of a GPT is longer than what a pipe holds."""
    small = ["--set", "vocabulary=20", "--set", "layers=1"]
    command = [sys.executable, "-m", "psg_fx", "graph", "gpt", "--json", *small]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_batch_for_a_factory(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{factories}:sized", "--batch", "7", "--quantity", "norms"]) == 0
    assert "planned for B=7" in capsys.readouterr().out


def test_report_as_json(factories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", f"{factories}:tiny", "--quantity", "norms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": "report.html", "bytes": (tmp_path / "report.html").stat().st_size
    }  # fmt: skip


def test_calibrate_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from psg_fx.cli import commands
    from psg_fx.planner import rates

    monkeypatch.setattr(commands, "calibrated", lambda device: rates.named(device))
    assert cli.main(["calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"path", "table"}
