"""Imports only go down."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = [
    {
        "copies", "ctc", "equal", "errors", "formulas", "grad_samples", "layout", "cost", "measure", "outputs",
        "progress", "quiet", "recurrence", "strides", "torch_private", "tracing",
    },
    {"facts", "lives", "network", "each", "arguments", "custom", "program", "trusted"},
    {"axes", "sites", "methods"},
    {"gradient", "paths", "state", "prefixes", "overlap"},
    {"asks", "crossover"},
    {"rules", "stages", "promises", "planning", "quantity", "products", "clipping"},
    {"evaluate", "groups", "rounding", "calibration", "budget", "settings"},
    {f"passes.{name}" for name in ("branches", "reasons", "recurrent", "twins", "rewrites", "writes")},
    {"passes.assumptions", "passes.row_sums"},
    {f"passes.{name}" for name in ("losses", "runner", "independence", "export", "lift", "rules", "probe")},
    {"passes.padding"},
    {"passes.masked"},
    {"passes.pieces", "passes.writing"},
    {"passes"},
    {"passes.pipeline"},
    {"sitecost"},
    {"mistakes", "step", "nonfinite", "report", "checks", "validation", "reference"},
    {"html"},
    {"api", "drop_in", "microbatch"},
]  # fmt: skip
"""Lowest first; a module imports from layers below its own, or from neighbours that do not import it."""

SHARED = {
    "assumptions", "branches", "export", "independence", "lift", "losses", "masked", "padding", "pieces", "probe",
    "reasons", "recurrent", "rewrites", "row_sums", "rules", "runner", "twins", "writes", "writing",
}  # fmt: skip
"""What passes share; beside these no pass imports another, and `pipeline` imports all of them."""


def modules() -> dict[str, Path]:
    found = {}
    for folder, prefix in ((ROOT / "psg_fx", ""), (ROOT / "passes", "passes.")):
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[(prefix + ".".join(parts)).rstrip(".")] = path
    return found


def imported(name: str, path: Path) -> set[str]:
    """The modules of psg_fx that this one imports, relative to psg_fx, but not inside functions and not for types."""
    package = f"psg_fx.{name}".split(".") if path.name == "__init__.py" else f"psg_fx.{name}".split(".")[:-1]
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{a.name}" if module in ("psg_fx", "psg_fx.passes") else module for a in node.names}
    return {m.removeprefix("psg_fx.") for m in found if m.startswith("psg_fx.")}


def layer(name: str) -> int | None:
    """The layer of a module: that of the longest entry it lies in."""
    best, found = -1, None
    for index, names in enumerate(LAYERS):
        for entry in names:
            if (name == entry or name.startswith(entry + ".")) and len(entry) > best:
                best, found = len(entry), index
    return found


@pytest.mark.parametrize("name", [name for name in modules() if layer(name) is not None])
def test_no_upward_import(name: str) -> None:
    own = layer(name)
    for other in sorted(imported(name, modules()[name])):
        above = layer(other)
        same_package = name.split(".")[0] == other.split(".")[0] and name.split(".")[0] in (
            "methods",
            "passes",
            "program",
        )
        assert above is not None, f"{name} imports {other}, which lies in no layer"
        assert above < own or (above == own and (same_package or name not in imported(other, modules()[other]))), (
            f"{name} (layer {own}) imports {other} (layer {above})"
        )


@pytest.mark.parametrize("name", [n for n in modules() if n.startswith("passes.") and n.count(".") == 1])
def test_passes_do_not_import_one_another(name: str) -> None:
    short = name.removeprefix("passes.")
    if short == "pipeline":
        return
    for other in imported(name, modules()[name]):
        if other.startswith("passes."):
            assert other.split(".")[1] in SHARED, f"{name} imports {other}"


def test_only_the_interface_imports_passes() -> None:
    allowed = {
        "api", "drop_in", "step", "report", "cli", "benchmarking", "contenders", "mistakes", "validation", "sitecost",
    }  # fmt: skip
    for name, path in modules().items():
        if name and not name.startswith("passes"):
            above = {other for other in imported(name, path) if other.startswith("passes")}
            assert not above or name.split(".")[0] in allowed, f"{name} imports {', '.join(sorted(above))}"


def test_every_module_has_a_layer() -> None:
    """Beside the tools around the compiler."""
    tools = {"", "cli", "benchmarking", "contenders", "problem", "peers", "demo", "zoo"}
    assert {n for n in modules() if layer(n) is None and n.split(".")[0] not in tools} == set()
