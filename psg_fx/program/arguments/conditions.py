"""What is checked at every call of a graph with rows of samples: what shapes do not show, values must.

Each condition is one number among the "mixing" outputs of the graph: the first row that breaks it, -1 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from psg_fx.errors import BadArgument, PsgError, SamplesMixed
from psg_fx.graph.facts import Entry
from psg_fx.program.arguments.rows import RowAxis

ROW_AXES = Entry[tuple[RowAxis, ...]]("row axes")
"""The axes of rows, in the order of their symbols (set by capture)."""


@dataclass(frozen=True)
class Condition:
    """One way in which samples could mix, or ids be no numbers of samples.

    kind: "ids" or "offsets" of an axis that are out of range; "pointer": an op joins row r of one axis with a row of
    another sample; "mask": a row attends to one of another sample; "order": a row comes behind one of a later sample.
    op, where: the first op that depends on it.  rows: which axis the row is counted in.  to: the axis pointed to.
    """

    kind: Literal["ids", "offsets", "pointer", "mask", "order"]
    op: str
    where: str
    rows: str
    to: str = ""

    def error(self, row: int) -> PsgError:
        """What is raised where `row` is the first to break it."""
        if self.kind == "ids":
            return BadArgument(
                f"row {row} of the {self.rows} belongs to no sample", where=self.where,
                why="its id is not among 0..B-1, the numbers of the samples",
                fix="number the samples from 0; drop rows that belong to none",
            )  # fmt: skip
        if self.kind == "offsets":
            return BadArgument(
                f"the offsets of the {self.rows} do not say where samples begin", where=self.where,
                why=f"entry {row} breaks it: they start at 0, never fall, and end at the number of rows",
                fix="pass the cumulated sizes of the samples: torch.cumsum of the sizes, with a 0 in front",
            )  # fmt: skip
        if self.kind == "order":
            return SamplesMixed(
                f"{self.op} goes by the places of rows, which lie otherwise where a sample is alone", where=self.where,
                why=f"row {row} of the {self.rows} comes behind one of a later sample",
                fix="give the rows in the order of their samples: x[ids.argsort(stable=True)]",
            )  # fmt: skip
        why = f"row {row} of the {self.rows} is joined with one of the {self.to} that belongs to another sample"
        fix = "let rows point to rows of their own sample alone; drop edges between graphs"
        if self.kind == "mask":
            why = f"row {row} of the {self.rows} attends to a row of another sample: its mask has a hole"
            fix = "let the mask be False (or -inf) wherever the ids of the two rows differ"
        what = f"{self.op} mixes samples in this batch, so per-sample gradients do not exist"
        return SamplesMixed(what, where=self.where, why=why, fix=fix)

    def __str__(self) -> str:
        said = {
            "ids": f"the ids of the {self.rows} are numbers of samples",
            "offsets": f"the offsets of the {self.rows} are in order",
            "pointer": f"{self.op}: {self.rows} point to {self.to} of their own sample",
            "mask": f"{self.op}: the mask keeps {self.rows} to their own sample",
            "order": f"{self.op}: {self.rows} are in the order of their samples",
        }
        return f"{said[self.kind]} ({self.where})"


CONDITIONS = Entry[tuple[Condition, ...]]("conditions")
"""In the order of the "mixing" output (set by unreduce)."""


def require(conditions: Sequence[Condition], first: torch.Tensor) -> None:
    """Raise for the first condition that a row breaks.  first: for each the first such row, -1 for none."""
    for row, condition in zip(first.tolist(), conditions, strict=True):
        if row >= 0:
            raise condition.error(row)
