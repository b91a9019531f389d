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

from psg_fx.errors import BadArgument
from psg_fx.graph import facts
from psg_fx.graph.facts import InputSpec, OutputSpec
from psg_fx.program.call import Call
from psg_fx.version import __version__

FORMAT = 1
BATCH = "B"
Shape = tuple[int | str, ...]
"""Sizes; those that follow from the number of samples are texts such as "B" and "12*B"."""


@dataclass(frozen=True)
class Entry:
    """One tensor.

    kind: of an input "parameter", "buffer", "input", "target" or "given"; of an output "loss", "answer", "buffer" (a
    new value, which an ordinary forward would leave there) or "check" (any true: the model's own code refuses the
    values, at the line `name`).
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
class Spec:
    """What is in a file.

    call: the structure of `((inputs, keywords), (targets, keywords))`.  constants: its leaves that are no tensors, and
    their places.  drop: samples whose norm is not finite are to be left out of the clipped sum.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    device: str
    call: str
    constants: tuple[tuple[int, Any], ...]
    drop: bool = False
    format: int = FORMAT
    psg_fx: str = __version__
    torch: str = field(default_factory=lambda: str(torch.__version__))

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """From the text of a file.  Raises BadArgument where another version wrote it in another format."""
        read = json.loads(text)
        if read.get("format") != FORMAT:
            raise BadArgument(
                f"the file has format {read.get('format')}", where="psg_fx.load(path)",
                why=f"psg_fx {read.get('psg_fx')} wrote it, and this is {__version__}, which reads format {FORMAT}",
                fix="write it again with step.export",
            )  # fmt: skip
        for part in ("inputs", "outputs"):
            read[part] = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in read[part])
        return cls(**{**read, "constants": tuple((place, value) for place, value in read["constants"])})

    def of_kind(self, *kinds: str) -> list[Entry]:
        """The inputs of some kinds, in order."""
        return [entry for entry in self.inputs if entry.kind in kinds]


def describe(
    inputs: Sequence[tuple[InputSpec, Node]], outputs: Sequence[tuple[OutputSpec, Node | None]], call: Call,
    batch: sympy.Symbol, defaults: Mapping[str, Any], drop: bool,
) -> Spec:  # fmt: skip
    """The Spec of a lowered graph.  inputs: those that are passed.  defaults: of what is given, where there is one."""
    entries = [
        Entry(spec.kind, spec.name, _shape(node, batch), _dtype(node), samples=spec.samples,
              default=defaults.get(spec.name) if spec.kind == "given" else None)
        for spec, node in inputs
    ]  # fmt: skip
    results = [
        Entry(spec.kind, spec.name, _shape(node, batch), _dtype(node), "losses" if spec.kind == "loss" else spec.field)
        for spec, node in outputs
        if node is not None
    ]
    structure = pytree.treespec_dumps(call.spec)
    return Spec(tuple(entries), tuple(results), call.tensors[0].device.type, structure, tuple(call.constants), drop)


def _shape(node: Node, batch: sympy.Symbol) -> Shape:
    sizes = facts.shape(node.meta["val"])
    return tuple(int(s) if s.is_number else str(s.subs(batch, sympy.Symbol(BATCH))) for s in sizes)


def _dtype(node: Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def sizes(shape: Shape, count: int) -> list[int]:
    """A shape for so many samples."""
    return [s if isinstance(s, int) else int(sympy.sympify(s, {BATCH: sympy.Integer(count)})) for s in shape]
