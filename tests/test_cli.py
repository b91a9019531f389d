"""The command line: what each command prints, and its exit codes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import psg_fx
from psg_fx import cli, zoo
from psg_fx.validation import ValidationReport, ValidationRow

BENCH = ["bench", "mlp", "--batch", "2", "--backend", "eager", "--seconds", "0.01", "--rounds", "1"]


def test_help_names_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ["bench", "explain", "validate", "MODULE:FACTORY", *zoo.names()])


def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BENCH, "--contenders", "ordinary-eager,loop/grads"]) == 0
    text = capsys.readouterr().out
    assert "ordinary-eager" in text
    assert "loop" in text
    assert "vmap " not in text


def test_bench_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert cli.main([*BENCH, "--contenders", "ordinary-eager", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["problem"]["batch"] == 2
    capsys.readouterr()
    assert cli.main([*BENCH, "--contenders", "ordinary-eager", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["contender"] == "ordinary-eager"


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("WRONG", 1)])
def test_validate_exit_code(monkeypatch: pytest.MonkeyPatch, verdict: str, code: int) -> None:
    report = ValidationReport([ValidationRow("w", 0.5, 1, verdict)], 1e-3, "")
    step = SimpleNamespace(validate=lambda *batch, **options: report)
    monkeypatch.setattr(cli, "compiled_step", lambda *args, **options: step)
    assert cli.main(["validate", "mlp"]) == code


def test_a_refusal_is_printed_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise psg_fx.errors.SamplesMixed("it mixes", where="here", why="a mean", fix="GroupNorm")

    monkeypatch.setattr(cli, "compiled_step", refuse)
    assert cli.main(["explain", "mlp"]) == 1
    assert capsys.readouterr().err == "it mixes\n  where  here\n  why    a mean\n  fix    GroupNorm\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nope"], "no example is called 'nope'"),
        (["explain", "mlp", "--set", "depth=3"], "mlp has no size called 'depth'"),
        (["explain", "mlp", "--set", "depth"], "--set needs KEY=VALUE"),
        (["explain", "mlp", "--quantities", "gradients"], "no contender computes 'gradients'"),
        (["explain", "mlp", "--device", "nonsense"], "nonsense"),
        (["bench", "mlp", "--contenders", "psg_fx"], "no contender matches 'psg_fx'"),
        (["explain", "no_such_module:make"], "cannot import 'no_such_module:make'"),
        (["explain", "json:nothing"], "cannot import 'json:nothing'"),
        (["explain", "json:dumps"], "must be callable with no arguments"),
        (["explain", "sys:maxsize"], "is a int, not a function"),
        (["explain", "builtins:dict"], "must return (model, loss_fn, inputs, targets[, batch_dim])"),
        (["explain", "builtins:dict", "--batch", "3"], "are for examples of the zoo"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch=0", "--threads=-1", "--quantities=,"])
def test_argparse_refuses(option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", "mlp", option])
    assert ended.value.code == 2


def test_a_factory_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from psg_fx import zoo\ndef make():\n    ex = zoo.example('mlp')\n"
    source += "    return ex.model, ex.loss_fn, ex.inputs, ex.targets, 0\n"
    (tmp_path / "cli_factory_module.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.from_factory("cli_factory_module:make").targets.shape == (32,)
