"""The programs in docs/examples run, on little, and what they print is true; the longer ones by `make test-all`."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support import oracle

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_listed(path: Path) -> None:
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"python docs/examples/{path.name}" in path.read_text(encoding="utf-8")


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_dp_digits(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opacus")
    from opacus.accountants import PRVAccountant

    steps, noise, delta = 48, 0.8, 1e-4
    table = load("dp_digits").main(
        ["--steps", str(steps), "--noise", str(noise), "--delta", str(delta), "--backend", "eager"]
    )
    accountant = PRVAccountant()
    accountant.history = [(noise, 1 / 12, steps)]
    epsilon = accountant.get_epsilon(delta)
    printed = capsys.readouterr().out
    for way, row in table.items():
        assert re.search(rf"^{re.escape(way)} .* {row['accuracy']:.1%} ", printed, re.M)
        assert row["steps/s"] > 0
        if way == "not private":
            assert row["ε"] == math.inf
            assert row["accuracy"] > 0.8
        else:
            assert 0 < row["ε"] == epsilon
            assert row["accuracy"] > 0.3  # of ten classes
            assert row["weights off by"] < 1e-3
    assert table["Opacus, hooks"]["weights off by"] == 0


@pytest.mark.rest
@pytest.mark.slow
def test_dp_users(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opacus")
    from opacus.accountants import PRVAccountant

    table = load("dp_users").main(["--steps", "30", "--noise", "0.8", "--backend", "eager"])
    accountant = PRVAccountant()
    accountant.history = [(0.8, 0.2, 30)]
    free, own, each = table.values()
    assert free["ε"] == math.inf
    assert own["ε"] == each["ε"] == accountant.get_epsilon(1e-3)
    assert free["accuracy"] > own["accuracy"] > each["accuracy"] + 0.1
    assert f"{own['accuracy']:.1%}" in capsys.readouterr().out


@pytest.mark.rest
@pytest.mark.slow
def test_ddp() -> None:
    command = [sys.executable, str(EXAMPLES / "ddp.py"), "--backend", "eager", "--steps", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    errors = [float(e) for e in re.findall(r"rank \d ([\d.e+-]+)", printed)]
    assert len(errors) == 4
    assert max(errors) < 1e-12
    assert "weights of all ranks are the same to the last bit" in printed


@pytest.mark.rest
@pytest.mark.slow
def test_influence(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("influence")
    table: dict[str, Any] = module.main(["--train", "60", "--test", "20", "--ranks", "8", "64", "--backend", "eager"])
    (_, inner, _), (k, few, few_all), (size, given, every) = table.values()
    assert (k, size) == (8 * 8 + 8, 650)
    assert 0 < inner < given < every
    assert few > 0.1
    assert few_all > 0.1
    assert every > 0.95  # the Hessian itself: what is left is that a sample is left out at once, not by a little
    assert f"{every:.3f}" in capsys.readouterr().out


def test_influence_store(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("influence_store")
    small = ["--samples", "600", "--batch", "64", "--steps", "100", "--rank", "4", "--test", "4", "--top", "5"]
    found = module.main([*small, "--backend", "eager"])
    assert 0 < found.before < len(found.store) == 600
    assert found.store.complete
    assert found.scores.shape == found.places.shape == (4, 5)
    assert torch.equal(found.scores, found.scores.sort(1, descending=True).values)
    assert found.agree > 0.5 > 0.2 > found.chance
    assert "not complete" in capsys.readouterr().out
    phi = found.store.projection.double()  # the queries, by another way: K⁻¹ from its eigenvectors
    values, vectors = torch.linalg.eigh(phi.T @ phi / 600)
    inverse = vectors / (values + module.DAMPING * values.mean()) @ vectors.T
    queries = module.preconditioned(found.store, found.store.projection[:3], block=100)
    assert oracle.relative_error(queries, phi[:3] @ inverse) < 1e-4


@pytest.mark.rest
@pytest.mark.slow
def test_packed_documents(capsys: pytest.CaptureFixture[str]) -> None:
    found = load("packed_documents").main(["--documents", "24", "--steps", "30", "--backend", "eager"])
    assert all(share > 0.6 for share in found.values())  # a third by chance
    assert "of the 8 most helpful documents" in capsys.readouterr().out


@pytest.mark.slow
def test_graph_norms(capsys: pytest.CaptureFixture[str]) -> None:
    found = load("graph_norms").main(["--graphs", "80", "--epochs", "30", "--backend", "eager"])
    assert found["norm of wrong"] > 1.5 * found["norm of right"]
    assert found["found"] > 2 * found["wrong"] ** 2 / found["graphs"]  # twice what chance finds
    assert "80 graphs with" in capsys.readouterr().out


@pytest.fixture
def char_gpt() -> ModuleType:
    pytest.importorskip("transformers")
    from external.torchvision_import import torchvision  # noqa: F401  (transformers imports it)

    return load("char_gpt")


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers and accelerate, about their own code
def test_char_gpt(char_gpt: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--length", "24", "--width", "16", "--layers", "1", "--characters", "20000", "--backend", "eager"]
    rows = char_gpt.main([*small, "--steps", "30", "--every", "15", "--batches", "4", "--out", str(tmp_path)])
    assert [row.step for row in rows] == [0, 15, 30]
    characters = char_gpt.Sequences(char_gpt.docstrings(20000), 24).characters
    assert rows[0].loss == pytest.approx(math.log(len(characters)), rel=0.05)
    assert rows[-1].loss < 0.9 * rows[0].loss
    assert all(0 < row.scale < math.inf for row in rows)
    assert (tmp_path / "noise_scale.png").stat().st_size > 10_000
    assert f"{rows[0].scale:.1f}" in capsys.readouterr().out


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_noise_scale_is_that_of_single_gradients(char_gpt: ModuleType) -> None:
    """Two batches: the unbiased variance in each, and the square of the common mean less what noise adds to it."""
    torch.manual_seed(0)
    data, per_batch, batches = char_gpt.Sequences(char_gpt.docstrings(5000), 8), char_gpt.MEASURED, 2
    config = char_gpt.GPT2Config(vocab_size=len(data.characters), n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = char_gpt.GPT2LMHeadModel(config).eval()
    measure = char_gpt.NoiseScale(model, data, every=1, batches=batches, backend="eager")
    measure.measure(0)
    draw = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.randint(len(data), (per_batch,), generator=draw) for _ in range(batches)])
    _, grads = oracle.loop_grads(model, lambda output: output.loss, data[rows])
    each = torch.cat([g.flatten(1) for g in grads.values()], 1)
    noise = torch.stack([part.var(0).sum() for part in each.split(per_batch)]).mean()
    signal = each.mean(0).square().sum() - noise / len(each)
    assert measure.rows[0].noise == pytest.approx(noise.item(), rel=1e-4)
    assert measure.rows[0].signal == pytest.approx(signal.item(), rel=1e-4)


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.inductor
def test_score_service(capsys: pytest.CaptureFixture[str]) -> None:
    found = load("score_client").main(["--steps", "40", "--backend", "eager"])
    assert found["psg_fx in the server"] == 0
    assert found["before"] < 1e-5
    assert found["after"] < 1e-4
    assert found["hits"] > 10
    assert "served without psg_fx" in capsys.readouterr().out
