"""The README does what it says: its Python runs, its outputs are real, its tables and links are complete."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import psg_fx

pytestmark = pytest.mark.xdist_group("readme")  # its blocks run once
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README, re.S)
PAGES = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]


@dataclass
class Run:
    """What the README's blocks print, in order, beside what it says they print."""

    printed: list[str]
    promised: list[str]
    names: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The blocks run one after another in one namespace, on the eager backend."""
    patch = pytest.MonkeyPatch()
    patch.chdir(tmp_path_factory.mktemp("readme"))
    patch.setattr(psg_fx, "transform", functools.partial(psg_fx.transform, backend="eager"))
    names: dict[str, Any] = {}
    printed = []
    for code, _ in BLOCKS:
        linecache.cache["/model.py"] = (len(code), None, code.splitlines(keepends=True), "/model.py")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "/model.py", "exec"), names)
        printed.append(out.getvalue())
    yield Run(printed, [text for _, text in BLOCKS], names)
    linecache.cache.pop("/model.py")
    patch.undo()


def test_shapes_are_those_in_the_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psg_fx, "transform", functools.partial(psg_fx.transform, backend="eager"))
    code, names, checked = BLOCKS[0][0], dict[str, Any](), 0
    for statement in ast.parse(code).body:
        exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
        claim = re.match(r"(\S+) +# (\[[\d, ]+\])", code.splitlines()[statement.lineno - 1])
        if claim:
            checked += 1
            assert str(list(eval(claim[1], names).shape)) == claim[2], claim[1]
    assert checked == 3


def test_what_looks_inside_runs(run: Run) -> None:
    assert "Plan: what is computed" in run.printed[1]
    assert "ok" in run.printed[1]


def test_it_is_short() -> None:
    assert len(README.split()) <= 900


def test_the_error_is_real(run: Run) -> None:
    assert run.printed[2] == run.promised[2]
    assert run.promised[2] in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


def test_every_quantity_is_listed() -> None:
    exported = {n for n, v in vars(psg_fx).items() if isinstance(v, type) and issubclass(v, psg_fx.Quantity)}
    listed = dict(re.findall(r"^\| `(\w+)\([^`]*\)` \| `(\w+)` \|", README, re.M))
    assert set(listed) == exported - {"Quantity"}
    assert all(getattr(psg_fx, name).field == field for name, field in listed.items())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert ((ROOT / page).parent / target).exists(), target


def test_every_design_note_is_indexed() -> None:
    folder = ROOT / "docs" / "design"
    notes = {p.name for p in folder.glob("*.md")} - {"README.md"}
    assert notes == set(re.findall(r"^\| \[([\w.]+)\]", (folder / "README.md").read_text(encoding="utf-8"), re.M))
