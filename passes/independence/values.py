"""What a rule sees of one op: its arguments by name, where their samples lie, and how to refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported, SamplesMixed
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxes, SampleAxis
from psg_fx.graph.sample_axis import Misfit, Single, positive, single

from .arguments import bound, flat_nodes, op_name
from .refused import FIX, REWRITE, mixed, no_place, not_shown

NUMBERING = (torch.int64, torch.int32)
"""Dtypes in which rows are numbered: others end, wrap around or round where a batch is large."""


@dataclass(frozen=True)
class Result:
    """What a rule found: the axis of each output, and what else is known of the values.

    uniform: all samples hold the same (a fill or an expand), so any order inside a folded dim is right.
    index: the values are the numbers i of the samples, `arange(B)` and its views (1), or number the rows of the samples
    one after the other, i·index + c where c is what one sample alone computes (0: neither).
    reduced: the samples are reduced away.
    structure: the values say how rows belong to samples (ids, offsets), and nothing of the samples.
    pairs: the last two dims are rows, and each entry is computed from its two rows.
    """

    axes: SampleAxes = None
    uniform: bool = False
    index: int = 0
    reduced: bool = False
    structure: bool = False
    pairs: bool = False


REDUCED = Result(reduced=True)


@dataclass(frozen=True)
class Argument:
    """A tensor argument: its node, its shape at B = 1 with the dim that knows B, and what has been found about it."""

    node: Node
    layout: Single
    found: Result

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the program of one sample."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.layout.shape)

    @property
    def axis(self) -> SampleAxis | None:
        """Where the samples lie."""
        return self.found.axes if isinstance(self.found.axes, SampleAxis) else None

    def fits(self, axis: SampleAxis | None) -> bool:
        """Whether the samples lie there; what is the same for all of them has the rows of a dim in any order."""
        own = self.axis
        if own is None or axis is None or not self.found.uniform:
            return own == axis
        return own.dim == axis.dim and own.outer * own.inner == axis.outer * axis.inner


def samples_of(value: Argument) -> SampleAxis:
    """The sample axis of a value that is known to carry samples."""
    axis = value.axis
    assert axis is not None
    return axis


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors of a `meta["val"]`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


ProvePart = Callable[[GraphModule, Mapping[Node, Result]], list[Result]]
"""From a graph inside of an op, and what is known of its inputs, to what is known of its outputs."""


@dataclass
class Op:
    """One op, as a rule sees it.  prove: what is known of the outputs of a graph inside of it."""

    node: Node
    batch: sympy.Symbol
    known: dict[Node, Result]
    prove: ProvePart

    @functools.cached_property
    def args(self) -> dict[str, Any]:
        """Its arguments by name."""
        return bound(self.node)

    @property
    def name(self) -> str:
        """`aten.mean`."""
        return op_name(self.node)

    def raw(self, name: str, default: Any = None) -> Any:
        """An argument as it stands in the graph."""
        found = self.args.get(name, default)
        return default if found is None else found

    def see(self, node: Node) -> Argument | None:
        """A node as a tensor value; None if it is a number or a tuple."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        return Argument(node, self.layout(value), self.known.get(node, Result()))

    def layout(self, value: torch.Tensor) -> Single:
        """The single shape of a tensor, or a refusal."""
        try:
            return single(facts.shape(value), self.batch)
        except Misfit as misfit:
            raise no_place(self.node, misfit, self._detail()) from None

    def value(self, name: str) -> Argument | None:
        """A tensor argument by name; None where it is absent or a number."""
        found = self.args.get(name)
        return self.see(found) if isinstance(found, Node) else None

    def need(self, name: str) -> Argument:
        """A tensor argument that must be there."""
        found = self.value(name)
        if found is None:
            raise self.unsupported(f"its argument {name!r} is not a tensor")
        return found

    def values_of(self, name: str) -> list[Argument]:
        """The tensors of a list argument."""
        return [v for n in flat_nodes(self.args.get(name)) if (v := self.see(n)) is not None]

    def values(self) -> list[Argument]:
        """All tensor arguments, in order."""
        return [v for a in self.args.values() for n in flat_nodes(a) if (v := self.see(n)) is not None]

    def sampled(self) -> list[Argument]:
        """The tensor arguments that carry samples."""
        return [v for v in self.values() if v.axis is not None]

    def outputs(self) -> list[Single]:
        """The single shapes of the outputs."""
        return [self.layout(t) for t in tensors(self.node.meta.get("val"))]

    def out(self) -> Single:
        """The single shape of the first output."""
        return self.outputs()[0]

    def dim(self, name: str, ndim: int, default: int = 0) -> int:
        """A dim argument, counted from the left."""
        return positive(int(self.raw(name, default)), ndim)

    def dims(self, name: str, ndim: int) -> list[int] | None:
        """A list-of-dims argument counted from the left; None where it is absent or empty (all dims)."""
        given = self.args.get(name)
        if given is None or given == []:
            return None
        return [positive(d, ndim) for d in ([given] if isinstance(given, int) else given)]

    def number(self, name: str, default: int) -> int:
        """A size argument as c of c * B or as the int it is (positions beyond the end stay beyond)."""
        given = self.raw(name, default)
        if isinstance(given, Node):
            return single([facts.expr(given.meta["val"])], self.batch).shape[0]
        return int(given)

    def refuse(self, why: str, fix: str = FIX, detail: str = "") -> SamplesMixed:
        """The samples mix here."""
        return mixed(self.node, why, fix, detail or self._detail())

    def unsupported(self, why: str, fix: str = REWRITE) -> NotYetSupported:
        """The samples may stay apart, but no rule shows it."""
        return not_shown(self.node, why, fix, self._detail())

    def _detail(self) -> str:
        axes = [self.known[n].axes for a in self.args.values() for n in flat_nodes(a) if n in self.known]
        first = next((a for a in axes if isinstance(a, SampleAxis)), None)
        return f"sample {first}" if first else ""


def broadcast(op: Op, values: Sequence[Argument], out_ndim: int) -> Result:
    """The axis of values combined element by element: all aligned from the right, all samples in the same place.

    A value without samples has size 1 (or no dim) there.  Values that are the same for all samples take any order
    inside a folded dim.
    """
    carriers = [v for v in values if v.axis is not None]
    if not carriers:
        return Result()
    shifted = [(v, SampleAxis(a.dim + out_ndim - v.ndim, a.outer, a.inner)) for v in carriers if (a := v.axis)]
    lead, axis = next(((v, a) for v, a in shifted if not v.found.uniform), shifted[0])
    for other, found in shifted:
        same_size = found.outer * found.inner == axis.outer * axis.inner
        if found.dim != axis.dim:
            raise op.refuse(
                f"%{lead.node.name} holds the samples in {axis} and %{other.node.name} in {found} (aligned from the "
                "right), so the result pairs each sample with every other",
                "give both the samples in the same dim, e.g. by unsqueeze, squeeze or transpose",
            )
        if found != axis and not (other.found.uniform and same_size):
            raise op.refuse(
                f"%{lead.node.name} holds the samples as {axis} and %{other.node.name} as {found}, so the rows that "
                "meet belong to different samples",
                "fold the dims of both in the same order",
            )
    return Result(axis, uniform=all(v.found.uniform for v in carriers))
