"""Programs that failed once: small ones, replayed at every run of the tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fuzz.program import Program

FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Row:
    """expect: "ok" or "refused".  why: what went wrong.  open: why it still does, or nothing."""

    program: Program
    expect: str
    why: str
    open: str = ""


def rows() -> dict[str, Row]:
    """All rows by the names of their files."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        row = json.loads(path.read_text())
        program = Program.from_json(json.dumps(row["program"]))
        found[path.stem] = Row(program, row["expect"], row["why"], row.get("open", ""))
    return found


def write(folder: Path, program: Program, why: str, expect: str = "ok") -> None:
    """A row as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {"why": why, "expect": expect, "program": json.loads(program.to_json())}
    (folder / f"{program.name}.json").write_text(json.dumps(row, indent=1) + "\n")
