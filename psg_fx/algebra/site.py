"""Sites: the ops where a parameter meets data, and what their rules may look at."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from psg_fx.algebra.network import Kind, Source
from psg_fx.graph import facts
from psg_fx.graph.facts import Entry, SampleAxis


@dataclass(frozen=True)
class Value:
    """A tensor of the joint graph, seen by a rule: where it is, shape (in the batch symbol), dtype, sample axis."""

    source: Source
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    samples: SampleAxis | None = None

    @property
    def symbol(self) -> str:
        """How it prints in a network."""
        return "ȳ" if self.source.kind is Kind.COTANGENT else "x"

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


@dataclass(frozen=True)
class Prefix:
    """How a site's operand is made of parameters: `graph(*inputs) -> operand`, reading no data.

    inputs: names of the captured placeholders it reads, and of what was drawn at random on the way; owners: for each,
    the parameter it holds ("" for others).  drawn: those of them that were drawn: the values of the forward pass.
    ops: how it prints.  casts: some op changes the dtype.  trivial: the operand is the parameter itself.
    selects: it only moves, drops or casts elements of one parameter (transpose, slice, view, ...), so that norms and
    inner products of gradients are the same before and after the pull-back.  across: its gradient is a sum over
    processes, of which each has a part at the operand.  half: the operand is of half precision.
    """

    operand: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    owners: Mapping[str, str]
    ops: tuple[str, ...] = ()
    casts: bool = False
    trivial: bool = False
    selects: bool = False
    across: bool = False
    half: bool = False
    drawn: frozenset[str] = frozenset()
    graph: GraphModule | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Operand:
    """An argument of a site that is derived from tracked parameters.

    position: among the flat arguments.  argument: as rules name it, "1" for the second one, "1.0" inside a list.
    """

    position: int
    argument: str
    value: Value
    prefix: Prefix


@dataclass(frozen=True)
class Site:
    """One op at which parameters meet data.

    args: the op's positional arguments; tensors are `Value`s, sizes are sympy expressions.
    cotangents: one per output of the op; None where the loss does not reach it.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[Value | None, ...]
    cotangents: tuple[Value | None, ...]
    batch: sympy.Symbol
    where: str = ""

    @property
    def op(self) -> str:
        """The op as it prints: `linear`, `conv2d`."""
        return str(self.target).removeprefix("aten.").removesuffix(".default")

    @property
    def kind(self) -> Hashable:
        """All that rules see of the site, with numbers in place of names: sites of one kind get the same networks."""
        numbers: dict[Source, int] = {}

        def nameless(value: Any) -> Hashable:
            if not isinstance(value, Value):
                return (type(value), repr(value) if isinstance(value, float) else value)  # nan is not itself
            number = numbers.setdefault(value.source, len(numbers))
            return (number, value.source.kind, value.shape, value.dtype, value.samples)

        seen = (self.args, self.kwargs, self.outputs, self.cotangents, [o.position for o in self.operands])
        flat, spec = pytree.tree_flatten(seen, is_leaf=lambda v: v is None or isinstance(v, Value))
        return (self.target, spec, tuple(map(nameless, flat)))

    @property
    def values(self) -> tuple[Value, ...]:
        """The tensors among its arguments."""
        flat = pytree.tree_leaves((self.args, self.kwargs), is_leaf=lambda v: isinstance(v, Value))
        return tuple(v for v in flat if isinstance(v, Value))

    @property
    def is_complex(self) -> bool:
        """Whether any value at the site is complex."""
        return any(v is not None and v.dtype.is_complex for v in (*self.values, *self.outputs))

    def input(self, index: int) -> Value:
        """The tensor argument `index`."""
        value = self.args[index]
        assert isinstance(value, Value), (self.name, index, value)
        return value

    def arg(self, index: int, name: str, default: Any) -> Any:
        """The argument `name` of the op, given by position `index` or by keyword."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    @property
    def output(self) -> Value:
        """The (first) output."""
        assert self.outputs[0] is not None
        return self.outputs[0]

    @property
    def cotangent(self) -> Value:
        """The gradient of the (first) output."""
        assert self.cotangents[0] is not None
        return self.cotangents[0]


SITES = Entry[tuple[Site, ...]]("sites")
"""Every site, in the graph's order (set by differentiate)."""

PREFIXES = Entry[Mapping[str, Prefix]]("prefixes")
"""The name of the node of each operand -> how it is made of parameters (set by sites)."""

READ = {kind.value: kind for kind in (Kind.ACTIVATION, Kind.COTANGENT)}
"""Kinds of outputs of a joint graph that networks read, as kinds of sources."""


def read_by_networks(gm: GraphModule) -> dict[Source, Node]:
    """The outputs of a joint graph that networks read."""
    return {Source(READ[s.kind], s.name): n for s, n in facts.returned(gm) if s.kind in READ and n is not None}
