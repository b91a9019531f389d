"""Imports only go down, those inside functions and those for types included, and no modules import one another."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = (
    {
        "digests",
        "errors",
        "frames",
        "garbage",
        "generators",
        "interrupts",
        "progress",
        "source",
        "tensors",
        "version",
        "zoo",
    },
    {"plain_objects"},
    {"machine", "op_table", "reference", "torch_private"},
    {"blocks", "graph"},
    {"ops", "program"},
    {"algebra"},
    {"planner", "quantities"},
    {"passes"},
    {"measure", "saved"},
    {"explain"},
    {"step"},
    {"distributed"},
    {"api", "loops"},
    {"benchmarking", "integrations"},
    {"", "cli", "demo"},
    {"__main__"},
)
"""Rooms (folders, and modules at the top), lowest first.  A room imports from lower floors and from itself."""

SHARED = {"promises", "runner"}
"""What every pass may import beside the rooms that several read; no other pass imports one, but `pipeline` does."""

READ_BY_OTHERS = {"independence", "rules", "unreduce"}
"""Folders of passes that have something to offer other passes: the proof, the rules, and the lifting of an op."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its name below `psg_fx`."""
    found = {}
    for folder, prefix in ((ROOT / "psg_fx", ""), (ROOT / "passes", "passes.")):
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[(prefix + ".".join(parts)).rstrip(".")] = path
    return found


@functools.cache
def imported(name: str) -> frozenset[str]:
    """The modules of psg_fx that this one imports anywhere in its text."""
    return frozenset(_imported(name, modules()[name].read_text(encoding="utf-8")))


def _imported(name: str, text: str) -> Iterator[str]:
    package = f"psg_fx.{name}".rstrip(".").split(".")
    if modules()[name].name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("psg_fx.") for a in node.names if a.name.startswith("psg_fx."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found = ".".join([*base, *([node.module] if node.module else [])])
            if found == "psg_fx" or found.startswith("psg_fx."):
                inside = found.removeprefix("psg_fx").lstrip(".")
                for alias in node.names:
                    below = f"{inside}.{alias.name}".lstrip(".")
                    yield below if below in modules() else inside


def room(name: str) -> str:
    return name.split(".")[0]


def floor(name: str) -> int | None:
    return next((index for index, rooms in enumerate(FLOORS) if room(name) in rooms), None)


def circle(through: str) -> list[str]:
    """Modules that lead from this one back to itself, or none."""
    ways = [[through]]
    seen = set()
    while ways:
        way = ways.pop()
        for other in sorted(imported(way[-1])):
            if other == through:
                return [*way, through]
            if other not in seen and other in modules() and room(other) == room(through):
                seen.add(other)
                ways.append([*way, other])
    return []


def test_every_room_has_a_floor() -> None:
    assert {room(name) for name in modules()} == set().union(*FLOORS)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name: str) -> None:
    own = floor(name)
    assert own is not None
    for other in sorted(imported(name)):
        below = floor(other)
        assert below is not None, f"{name} imports {other}, which lies in no room"
        assert below < own or room(other) == room(name), f"{name} (floor {own}) imports {other} (floor {below})"


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_circles(name: str) -> None:
    """Packages whose `__init__` offers what lies in them are no circle: their modules name one another directly."""
    assert not (found := circle(name)), " -> ".join(found)


@pytest.mark.parametrize("name", [n for n in sorted(modules()) if n.startswith("passes.") and n != "passes.pipeline"])
def test_passes_do_not_import_one_another(name: str) -> None:
    own = name.split(".")[1]
    allowed = {own} | SHARED | (READ_BY_OTHERS - {own})
    for other in sorted(imported(name)):
        if other.startswith("passes."):
            assert other.split(".")[1] in allowed, f"{name} imports {other}"


def test_imports_of_passes_are_seen_by_tools_that_know_only_folders() -> None:
    """One another by relative imports, the rest by its name: both lead somewhere for an editor or a type checker that
    takes the checkout as it lies, with `passes/` at its top, and for Python, to which it is `psg_fx.passes`.
    """
    for path in sorted((ROOT / "passes").rglob("*.py")):
        depth = len(path.relative_to(ROOT).parts) - 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                absolute = not node.level and (node.module or "").startswith("psg_fx.passes")
                assert not absolute, f"{path.name}: {ast.unparse(node)}"
                assert node.level <= depth, f"{path.name}: {ast.unparse(node)}"
