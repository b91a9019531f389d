"""What a file says of its inputs and outputs: JSON, one entry for each in the order in which they are passed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument, first_line
from psg_fx.graph import facts
from psg_fx.graph.facts import InputSpec, OutputSpec
from psg_fx.program.arguments.call import Call
from psg_fx.program.arguments.conditions import Condition
from psg_fx.program.arguments.rows import RowAxis, Rows
from psg_fx.tensors import short_name
from psg_fx.version import __version__

FORMATS = (1, 2, 3)
"""Files of samples that have a dim of their own; of samples that are rows; of either, where code has decided by the
values of buffers.
"""

BATCH = "B"
Shape = tuple[int | str, ...]
"""Sizes; those that follow from the number of samples are texts such as "B" and "12*B"; numbers of rows "R0", "R1"."""


def names_of_sizes(axes: int) -> tuple[str, ...]:
    """The number of samples, and of rows along each axis, as they are written."""
    return (BATCH, *(f"R{k}" for k in range(axes)))


@dataclass(frozen=True)
class Entry:
    """One tensor.

    kind: of an input "parameter", "buffer", "input", "target" or "given"; of an output "loss", "answer", "buffer" (a
    new value, which an ordinary forward would leave there), "check" (any true: the model's own code refuses the
    values, at the line `name`) or "mixing" (for each condition the first row that breaks it, -1 for none).
    name: of the parameter, buffer or argument; of an answer the parameter it belongs to, or "".
    field: of an output: where it stands in what a step returns.
    samples: of an input: the dim in which the samples lie.
    default: of what is given: a number or nested lists, spread over the shape; None where it must be given.
    """

    kind: str
    name: str
    shape: Shape
    dtype: str
    field: str = ""
    samples: int | None = None
    default: Any = None


@dataclass(frozen=True)
class Axis:
    """An axis of rows: what is known of a `RowAxis` without the code that made it.  ids: None where they are found in
    the graph alone.
    """

    ids: str | int | None
    offsets: bool
    tensor: int | None
    closed: bool
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, axis: RowAxis) -> Axis:
        """What a file keeps of an axis."""
        ids = axis.rows.ids
        return cls(None if callable(ids) else ids, axis.rows.offsets, axis.tensor, axis.closed, axis.inputs)

    def read(self) -> RowAxis:
        """The axis of a call."""
        return RowAxis(Rows(self.ids, 0, self.offsets), self.tensor, self.closed, self.inputs)


@dataclass(frozen=True)
class OfRows:
    """What is said of samples that are rows.

    axes: those of sizes "R0", "R1", ...  counts: places of the ints among the leaves that are the number of samples.
    conditions: of the output of kind "mixing", in order.
    """

    axes: tuple[Axis, ...]
    counts: tuple[int, ...]
    conditions: tuple[Condition, ...]

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> OfRows:
        """From JSON."""
        axes = tuple(Axis(**{**axis, "inputs": tuple(axis["inputs"])}) for axis in said["axes"])
        return cls(axes, tuple(said["counts"]), tuple(Condition(**one) for one in said["conditions"]))


@dataclass(frozen=True)
class Spec:
    """What is in a file.

    call: the structure of `((inputs, keywords), (targets, keywords))`.  constants: its leaves that are no tensors, and
    their places.  drop: samples whose norm is not finite are to be left out of the clipped sum.  rows: None where
    samples have a dim of their own.  decided: buffers by whose values the code has decided, and these.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    device: str
    call: str
    constants: tuple[tuple[int, Any], ...]
    drop: bool = False
    rows: OfRows | None = None
    decided: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    format: int = 1
    psg_fx: str = __version__
    torch: str = field(default_factory=lambda: str(torch.__version__))

    def to_json(self) -> str:
        """As text."""
        said = asdict(self)
        if self.rows is None:
            del said["rows"]
        if not self.decided:
            del said["decided"]
        return json.dumps(said, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """From the text of a file.  Raises BadArgument where another version wrote it in another format."""
        read = json.loads(text)
        if read.get("format") not in FORMATS:
            raise BadArgument(
                f"the file has format {read.get('format')}", where="psg_fx.load(path)",
                why=f"psg_fx {read.get('psg_fx')} wrote it, and this is {__version__}, which reads formats {FORMATS}",
                fix="write it again with step.export",
            )  # fmt: skip
        for part in ("inputs", "outputs"):
            read[part] = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in read[part])
        rows = None if read.get("rows") is None else OfRows.read(read["rows"])
        return cls(**{**read, "constants": tuple((place, value) for place, value in read["constants"]), "rows": rows})

    def of_kind(self, *kinds: str) -> list[Entry]:
        """The inputs of some kinds, in order."""
        return [entry for entry in self.inputs if entry.kind in kinds]


def is_passed(spec: InputSpec) -> bool:
    """Whether an input of the graph is one of the file: what code and loss hold is in it as it is now."""
    return spec.kind != "constant" and not (spec.kind == "buffer" and not spec.target.startswith("model."))


def describe(
    inputs: Sequence[tuple[InputSpec, Node]], outputs: Sequence[tuple[OutputSpec, Node | None]], call: Call,
    known: facts.GraphFacts, defaults: Mapping[str, Any], drop: bool, conditions: tuple[Condition, ...],
    decided: Mapping[str, Sequence[Any]],
) -> Spec:  # fmt: skip
    """The Spec of a lowered graph.  inputs: those that are passed.  defaults: of what is given, where there is one."""
    written = map(sympy.Symbol, names_of_sizes(len(known.rows)))
    names = dict(zip((known.batch, *known.rows), written, strict=True))
    entries = [
        Entry(spec.kind, spec.name, _shape(node, names), _dtype(node), samples=spec.samples,
              default=defaults.get(spec.name) if spec.kind == "given" else None)
        for spec, node in inputs
    ]  # fmt: skip
    results = [
        Entry(spec.kind, spec.name, _shape(node, names), _dtype(node), "losses" if spec.kind == "loss" else spec.field)
        for spec, node in outputs
        if node is not None
    ]
    structure = _structure(call)
    rows = OfRows(tuple(map(Axis.of, call.axes)), call.counts, conditions) if call.axes else None
    return Spec(
        tuple(entries), tuple(results), call.tensors[0].device.type, structure, tuple(call.constants), drop, rows,
        decided, 3 if decided else 2 if call.axes else 1,
    )  # fmt: skip


def _structure(call: Call) -> str:
    """How the call's arguments are arranged, in JSON."""
    try:
        return pytree.treespec_dumps(call.spec)
    except NotImplementedError as error:
        raise BadArgument(
            "an object among the inputs cannot be described in a file", where="step.export(path, inputs, targets)",
            why=f"who loads the file may not have its class: {first_line(error)}",
            fix="export with inputs in tuples, lists and dicts, for a model that takes those",
        ) from error  # fmt: skip


def _shape(node: Node, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Shape:
    sizes = facts.shape(node.meta["val"])
    return tuple(int(s) if s.is_number else str(s.subs(names)) for s in sizes)


def _dtype(node: Node) -> str:
    return short_name(node.meta["val"].dtype)


def sizes(shape: Shape, count: int, rows: Sequence[int] = ()) -> list[int]:
    """A shape for so many samples, and so many rows along each axis."""
    known = dict(zip(names_of_sizes(len(rows)), map(sympy.Integer, (count, *rows)), strict=True))
    return [s if isinstance(s, int) else int(sympy.sympify(s, known)) for s in shape]
