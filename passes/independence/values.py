"""What a rule sees of one op: its arguments by name, where their samples lie, and how to refuse."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.errors import NotYetSupported, PsgError, SamplesMixed
from psg_fx.graph import facts
from psg_fx.graph.facts import SampleAxes, SampleAxis
from psg_fx.graph.sample_axis import Misfit, Ragged, Single, positive, single
from psg_fx.ops.of_users.custom_call import custom_call
from psg_fx.source import locate
from psg_fx.tensors import SYMBOLS

NUMBERING = (torch.int64, torch.int32)
"""Dtypes in which rows are numbered: others end, wrap around or round where a batch is large."""
NUMBERS = "it computes with the numbers of the samples (arange over the batch), which one sample alone lacks"
NUMBERS_FIX = "use arange(B) only to pick each sample's row: x[torch.arange(B), ids]"
FIX = "write it so that every sample is computed from its own rows alone"
REWRITE = "rewrite this line with other ops, or write a rule for this op (docs/add-an-op.md)"
GATHER = "gather what each row needs (of experts: their weights[ids], then bmm), or compute all and multiply by a mask"


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


def op_name(node: Node) -> str:
    """`aten.mean` for the error texts; a custom function has its own name."""
    target = node.target
    if (call := custom_call(target)) is not None:
        return call.name
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    return getattr(target, "__name__", str(target))


def bound(node: Node) -> dict[str, Any]:
    """The arguments of an op by the names of its schema, defaults included."""
    target = node.target
    if target is operator.getitem:
        return {"self": node.args[0], "index": node.args[1]}
    assert isinstance(target, torch._ops.OpOverload)
    given: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            given[argument.name] = node.args[position]
        else:
            given[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return given


def dim_of(node: Node, ndim: int) -> int:
    """The argument `dim` of an op, from the front."""
    dim: int = bound(node)["dim"] % ndim
    return dim


def flat_nodes(argument: object) -> Iterator[Node]:
    """The nodes in an argument, nested lists included."""
    if isinstance(argument, Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for part in argument:
            yield from flat_nodes(part)


def is_symbolic(node: Node, batch: sympy.Symbol) -> bool:
    """Whether the node is a number (SymInt, SymFloat) that depends on B."""
    value = node.meta.get("val")
    if isinstance(value, SYMBOLS):
        return batch in value.node.expr.free_symbols
    return False


def symbolic_values(node: Node, batch: sympy.Symbol) -> list[Node]:
    """The numbers that depend on B and enter `node` as values rather than as sizes: `x / x.shape[0]`."""
    values = value_arguments(node)
    given = ((name, n) for name, argument in bound(node).items() for n in flat_nodes(argument)) if values else ()
    return [n for name, n in given if name in values and is_symbolic(n, batch)]


def value_arguments(node: Node) -> list[str]:
    """The names of the arguments whose numbers are values rather than sizes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket is torch.ops.aten.arange:
        return []  # where arange ends is its size
    types = {a.name: str(a.real_type) for a in node.target._schema.arguments}
    drawn = ("low", "high") if op_name(node).startswith("aten.randint") else ()  # between which numbers, as ints
    return [name for name, kind in types.items() if name in drawn or ("SymInt" not in kind and "int" not in kind)]


def symbolic_sizes(node: Node, batch: sympy.Symbol) -> list[Node]:
    """The numbers that depend on B and enter `node` as sizes or positions."""
    values, is_op = value_arguments(node), isinstance(node.target, torch._ops.OpOverload)
    given = bound(node) if is_op else dict(enumerate((*node.args, *node.kwargs.values())))
    found = [n for name, argument in given.items() if name not in values for n in flat_nodes(argument)]
    return [n for n in found if is_symbolic(n, batch)]


def unseen_size(node: Node, batch: sympy.Symbol) -> Node | None:
    """A number that depends on B, decides what a value holds, and does not show in its sizes: where `arange` begins,
    by how much `roll` shifts.
    """
    value = node.meta.get("val")
    sizes = symbolic_sizes(node, batch)
    if not sizes or not isinstance(value, torch.Tensor):
        return None
    if node.target in (torch.ops.aten.arange.start, torch.ops.aten.arange.start_step) and node.args[0] in sizes:
        return sizes[0]
    return None if any(batch in size.free_symbols for size in facts.shape(value)) else sizes[0]


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
        found = self.known.get(node, Result())
        if isinstance(found.axes, SampleAxis):
            return Argument(node, self.layout(value), found)
        try:
            return Argument(node, single(facts.shape(value), self.batch), found)
        except Misfit as misfit:
            raise no_place(self.node, misfit, self._detail()) from None

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


def mixed(node: Node, why: str, fix: str = FIX, detail: str = "") -> SamplesMixed:
    """`SamplesMixed` at a node."""
    what = f"{op_name(node)} mixes samples, so per-sample gradients do not exist"
    return SamplesMixed(what, where=locate(node, detail), why=why, fix=fix)


def not_shown(node: Node, why: str, fix: str = REWRITE, detail: str = "") -> NotYetSupported:
    """The refusal of an op of which nothing shows what it does with samples."""
    what = f"{op_name(node)} cannot be shown to keep samples apart"
    return NotYetSupported(what, where=locate(node, detail), why=why, fix=fix)


def no_place(node: Node, misfit: Misfit, detail: str = "") -> PsgError:
    """The refusal of a shape in which the samples have no place: not yet, where it depends on the data."""
    if not isinstance(misfit, Ragged):
        return mixed(node, str(misfit), FIX, detail)
    return not_shown(node, f"{misfit}, so no sample's rows have a place", GATHER, detail)


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
