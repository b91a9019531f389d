"""What a benchmark has found: a row for each contender, and all of them as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tabulate import tabulate

from psg_fx.benchmarking.problem import ORDINARY
from psg_fx.measure.device_work import Kernel, Pause

_IF_ANY = ("device ms", "launches", "")
"""Columns that are shown where some row has them: those of CUDA devices, and failures."""


@dataclass
class BenchmarkRow:
    """One contender: seconds, bytes, the ratio to the fastest ordinary step, and its relative error or failure.

    device_s, launches: on CUDA, how long the device is busy in one step, and with how many kernels, copies and fills;
    kernels: the longest of them.  pauses: the longest times in which it has nothing to do.
    """

    contender: str
    quantity: str
    median_s: float | None = None
    iqr_s: float | None = None
    blocks: int = 0
    first_call_s: float | None = None
    peak_bytes: int | None = None
    device_s: float | None = None
    launches: float | None = None
    ratio: float | None = None
    error: float | None = None
    failure: str | None = None
    kernels: Sequence[Kernel] = ()
    pauses: Sequence[Pause] = ()


@dataclass(frozen=True)
class BenchmarkReport:
    """All rows, the problem's sizes, and the machine; `str()` is a table."""

    rows: Sequence[BenchmarkRow]
    problem: Mapping[str, Any]
    environment: Mapping[str, Any]
    notes: Sequence[str] = field(default=())

    def row(self, contender: str, quantity: str = ORDINARY) -> BenchmarkRow | None:
        """The row of that contender and quantity, if it was measured."""
        return next((r for r in self.rows if (r.contender, r.quantity) == (contender, quantity)), None)

    def fastest_ordinary(self) -> BenchmarkRow | None:
        """The ordinary step with the least median time."""
        timed = [r for r in self.rows if r.quantity == ORDINARY and r.median_s is not None]
        return min(timed, key=lambda r: r.median_s or math.inf, default=None)

    def to_json(self) -> str:
        """Everything, in base units (seconds, bytes)."""
        parts = {"problem": self.problem, "environment": self.environment, "notes": list(self.notes)}
        return json.dumps({**parts, "rows": [asdict(r) for r in self.rows]}, indent=2)

    def to_markdown(self) -> str:
        """The table as GitHub shows it, without heading."""
        return self._table("github")

    def _table(self, style: str) -> str:
        columns = {
            "contender": [r.contender for r in self.rows],
            "quantity": [r.quantity for r in self.rows],
            "median ms": [_shown(r.median_s, 1e3, 2) for r in self.rows],
            "IQR ms": [_shown(r.iqr_s, 1e3, 2) for r in self.rows],
            "× ordinary": [_shown(r.ratio, 1, 2) for r in self.rows],
            "device ms": [_shown(r.device_s, 1e3, 2) for r in self.rows],
            "launches": [_shown(r.launches, 1, 0) for r in self.rows],
            "peak MB": [_shown(r.peak_bytes, 1e-6, 1) for r in self.rows],
            "first call s": [_shown(r.first_call_s, 1, 1) for r in self.rows],
            "error": ["-" if r.error is None else f"{r.error:.0e}" for r in self.rows],
            "": [r.failure or "" for r in self.rows],
        }
        shown = {name: cells for name, cells in columns.items() if name not in _IF_ANY or {*cells} - {"-", ""}}
        aligned = ["left" if name in ("contender", "quantity", "") else "right" for name in shown]
        return tabulate(shown, headers="keys", tablefmt=style, disable_numparse=True, colalign=aligned)

    def __str__(self) -> str:
        where = self.environment
        machine = where.get("gpu") or f"{where['cpu']}, threads {where['threads']}"
        sizes = ", ".join(f"{key} {value}" for key, value in self.problem.items())
        return "\n".join([f"torch {where['torch']}, {machine}", sizes, self._table("simple"), *self.notes])


def _shown(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
