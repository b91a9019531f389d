"""What is installed is complete, is imported under one name, and mentions no machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LEFT_OUT = ("build", "dist", "demo-output")
TEXTS = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".cfg", ".sh"}
ABSOLUTE = re.compile(r"(?<![\w./])(?:/(?:home|root|Users|work|workspace|mnt|srv|opt|var|private)/[\w.]|[A-Z]:\\\w)")


def packages() -> Iterator[str]:
    for top, name in (("psg_fx", "psg_fx"), ("passes", "psg_fx.passes")):
        for init in (ROOT / top).rglob("__init__.py"):
            yield ".".join([name, *init.parent.relative_to(ROOT / top).parts])


def test_every_package_is_installed() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(packages())


def test_what_is_not_python_is_installed_with_it() -> None:
    """Pages of the report, kernels in C++."""
    data = PROJECT["tool"]["setuptools"]["package-data"]
    listed = {
        file for name, globs in data.items() for glob in globs for file in (ROOT / name.replace(".", "/")).glob(glob)
    }
    found = {file for file in (ROOT / "psg_fx").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert {file for file in found if file.suffix != ".py"} == listed


@pytest.mark.parametrize("top", ["psg_fx", "passes"])
def test_every_folder_with_modules_is_a_package(top: str) -> None:
    folders = {path.parent for path in (ROOT / top).rglob("*.py")}
    assert not [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]


def test_passes_is_not_imported_under_its_folder_name() -> None:
    found = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode != 0
    assert "ImportError: this folder is the package psg_fx.passes: use `import psg_fx.passes`" in found.stderr


def test_the_command_line_is_installed() -> None:
    module, _, function = PROJECT["project"]["scripts"]["psg-fx"].partition(":")
    assert hasattr(__import__(module, fromlist=[function]), function)


def sources() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(p.startswith(".") or p.endswith(".egg-info") or p in LEFT_OUT for p in parts)
        if not hidden and path.is_file() and (path.suffix in TEXTS or path.name in ("Makefile", "LICENSE")):
            yield path


def test_no_file_names_a_place_on_a_machine() -> None:
    found = []
    for path in sources():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if ABSOLUTE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found
