"""`bench/gpu.py` up to where a device is needed: the package as it lies in a checkout, and what each part is told."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu

    return gpu


@pytest.mark.rest  # a process of its own that imports torch
def test_the_package_is_that_of_the_checkout(gpu: ModuleType, tmp_path: Path) -> None:
    environment = gpu.as_installed(tmp_path)
    code = "import psg_fx, psg_fx.passes.pipeline as p; print(psg_fx.__file__, p.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [Path(name).is_relative_to(tmp_path) for name in done.stdout.split()] == [True, True]


@pytest.fixture
def words(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What a part is told."""

    def of(part: str) -> list[str]:
        told: list[str] = []
        monkeypatch.setattr(gpu, "limited", lambda part, words, environment, out=None: told.extend(words))
        gpu.run(part, "some-device", tmp_path / "result.txt", {})
        return told

    return of


@pytest.mark.parametrize("part", ["calibrate", "gram_dots", "kernels", "moved", "weighted_sums", "compare"])
def test_every_part_understands_what_it_is_told(
    words: Callable[[str], list[str]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = words(part)
    monkeypatch.setattr(sys, "argv", [*told, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(told[0], run_name="__main__")
    assert ended.value.code == 0


@pytest.mark.rest  # pytest in a process of its own collects tests/cuda
def test_the_tests_are_found(gpu: ModuleType, words: Callable[[str], list[str]], tmp_path: Path) -> None:
    """In a process of their own, as the other parts are, and by pytest as it is there."""
    told = words("tests")
    told = [*told[: told.index("-n")], "--collect-only", "-o", f"cache_dir={tmp_path}"]
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
