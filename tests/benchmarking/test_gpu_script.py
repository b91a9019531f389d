"""`bench/gpu.py` up to where a device is needed: the package as it lies in a checkout, and what each part is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu

    return gpu


def test_the_package_is_that_of_the_checkout(gpu: ModuleType, tmp_path: Path) -> None:
    environment = gpu.as_installed(tmp_path)
    code = "import psg_fx, psg_fx.passes.pipeline as p; print(psg_fx.__file__, p.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [Path(name).is_relative_to(tmp_path) for name in done.stdout.split()] == [True, True]


@pytest.mark.parametrize("part", ["tests", "calibrate", "kernels", "compare"])
def test_every_part_understands_what_it_is_told(
    gpu: ModuleType, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(gpu, "limited", lambda part, words, environment, out=None: told.extend(words))
    gpu.run(part, "some-device", tmp_path / "result.txt", {})
    if part == "tests":
        told = [*told[: told.index("-n")], "--collect-only", "-o", f"cache_dir={tmp_path}"]
    else:
        told.append("--help")
    done = subprocess.run(
        [sys.executable, *told], cwd=ROOT, env=gpu.as_installed(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sum(gpu.LIMITS.values()) < 25 * 60


@pytest.mark.skipif('__import__("torch").cuda.is_available()', reason="there is one")
def test_without_a_device_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "gpu.py")], capture_output=True, text=True, check=False)
    assert "there is no CUDA device" in done.stderr
    assert done.returncode == 1
