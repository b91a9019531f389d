"""What the passes know about a graph and its values, and how they tell one another.

Passes never import one another.  A fact about a value is one frozen `Fact` in `node.meta["psg_fx"]`; a fact about the
whole graph is one `GraphFacts` in `gm.meta["psg_fx"]`.  A pass replaces facts; it never mutates one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import sympy
import torch
from torch.fx import GraphModule, Node

KEY = "psg_fx"


@dataclass(frozen=True)
class SampleAxis:
    """Where the samples of a value lie: dim `dim` has size `outer * B * inner`, laid out row-major in that order.

    `(dim=0)` is the ordinary batch dim; `x.view(B*T, D)` has inner=T; `[T, B, D].view(T*B, D)` has outer=T.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def __str__(self) -> str:
        size = "·".join(str(part) for part in (self.outer, "B", self.inner) if part != 1)
        return f"dim {self.dim} = {size}" if size != "B" else f"dim {self.dim}"


SampleAxes = SampleAxis | None | tuple["SampleAxis | None", ...]
"""The sample axis of a value; a tuple for an op with several outputs; None where no samples are carried."""


Holds = Literal["parameter", "buffer", "constant", "input", "target", "given", "tangent"]


@dataclass(frozen=True)
class InputSpec:
    """What a placeholder holds.

    kind: "constant" is a tensor lifted from the code; "given" is given at the call, for a quantity.
    name: the model's own name of a parameter or buffer (canonical for tied ones), or a readable one.
    samples: the dim of the input in which the samples lie; None where all samples share it.
    rows: the dim in which rows of samples lie, of which a sample has any number.
    structure: it says of which sample rows are, and nothing of the samples themselves.
    tracked: a parameter whose per-sample gradients are asked.
    target: where a parameter or buffer is found in the captured program ("model.fc.weight").
    """

    kind: Holds
    name: str
    samples: int | None = None
    tracked: bool = False
    target: str = ""
    rows: int | None = None
    structure: bool = False


Returns = Literal[
    "loss", "output", "buffer", "written", "check", "ids", "mixing", "activation", "cotangent", "input_gradient",
    "answer",
]  # fmt: skip
LEFT_BEHIND = ("buffer", "written", "check")
"""What an ordinary forward leaves behind or raises, and no result of a step."""

ABOUT_ROWS = ("ids", "mixing")
"""What says of which sample rows are, and whether rows of two samples meet."""


DETACHED = "detached"
"""The field of an output to which no gradient comes back (`return h.detach(), h`)."""
PLACES = "places"
"""The field of a check that each sample has as many places as values: else samples mix."""
DRAWN = "drawn"
"""The field of a check that a random number is not zero."""
PICKS = "picks"
"""The field of a check that a mask picks as many places of each sample as in the call that was captured."""
ARM = "arm"
"""The field of a check that a mask picks nothing, so that the arm is not met which the graph leaves out."""


@dataclass(frozen=True)
class OutputSpec:
    """What an entry of the (flat) output holds.

    kind: of the program the "loss" or an "output" of the model, the new value of a "buffer" or an attribute
    ("written"), a "check" (true where the code would have raised), the "ids" of an axis of rows, and "mixing", the
    first row at which samples meet for each way in which they could (-1: none); of its backward an "activation" that a
    site reads, a "cotangent" and an "input_gradient"; of a quantity an "answer".
    name: the buffer, line, node, input or parameter that it belongs to; "" for an answer of all parameters.
    field: where an answer stands in what a step returns.
    """

    kind: Returns
    name: str
    field: str = ""

    @property
    def label(self) -> str:
        """The field of an answer; else the kind."""
        return self.field or self.kind

    @property
    def title(self) -> str:
        """Its label, behind the name of what it belongs to."""
        return f"{self.name}_{self.label}" if self.name else self.label


@dataclass(frozen=True)
class Fact:
    """What is known about the value of a node.

    samples: where the samples lie (set by batch).
    reduced: the value is reduced over the samples; only the loss may consume it (set by batch, gone after unreduce).
    uniform: all samples hold the same (set by batch).
    index: the values number the samples (1) or their rows (the step from a sample to the next); 0: neither (set by
    batch).
    structure: the value says how rows belong to samples, and nothing of these (set by batch).
    proof: which argument shows that the op keeps the samples apart ("elementwise", "view", "trusted", ...).
    params: names of the tracked parameters the value is derived from, when it carries no samples (set by sites).
    site: the name of the site this node is (set by sites).
    contracts: the parameter whose gradients are contracted here (set by lower).
    """

    samples: SampleAxes = None
    reduced: bool = False
    uniform: bool = False
    index: int = 0
    structure: bool = False
    proof: str = ""
    params: frozenset[str] = frozenset()
    site: str = ""
    contracts: str = ""


@dataclass(frozen=True)
class GraphFacts:
    """What is known about the whole graph.

    batch: the symbol of the batch size in all shapes.
    constants: tensors that placeholders hold, by name.
    one_size: the graph is for the batch size of its capture only.  most: for up to so many samples (None: any number).
    held: names of parameters that the loss reaches through its closure.
    not_alone: the line of an op that treats a batch of one otherwise in what the code keeps (set by batch).
    written_copy: the line that writes where a value may have a copy or not, "" for none.
    squeezed: the line of a squeeze that may take the samples, and of which nothing but its size is read, "" for none.
    trims: the line that pads packed sequences to the longest one of the batch, "" for none.
    rounds: the code rounds a value to fewer bits, and computes with it in more.
    statistics: buffers and attributes that keep a statistic of the batch (set by batch).
    rows: the symbols of the numbers of rows, for each axis of rows whose samples have any number of them.
    runs_code: passes run code of the user's, so tensors in the graph may be the user's (set by differentiate).
    leaves_out: samples whose gradient is not finite have no part in clipped sums (set by lower).
    more: what is of types that this module does not know (`Entry`).
    """

    batch: sympy.Symbol
    outputs: tuple[OutputSpec, ...] = ()
    notes: tuple[str, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    one_size: bool = False
    held: frozenset[str] = frozenset()
    written_copy: str = ""
    squeezed: str = ""
    trims: str = ""
    not_alone: str = ""
    rounds: bool = False
    statistics: tuple[str, ...] = ()
    rows: tuple[sympy.Symbol, ...] = ()
    runs_code: bool = False
    leaves_out: bool = False
    most: int | None = None
    more: Mapping[Entry[Any], Any] = field(default_factory=dict)


T = TypeVar("T")


class Entry(Generic[T]):
    """Something known about whole graphs, declared beside its type: `PLAN = Entry[Plan]("plan")`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"the {self._name} of a graph"

    def of(self, gm: GraphModule) -> T:
        """What it is for this graph."""
        found: T = graph_facts(gm).more[self]
        return found

    def found(self, gm: GraphModule) -> T | None:
        """The same; None where nothing is said."""
        return graph_facts(gm).more.get(self)

    def put(self, gm: GraphModule, value: T) -> None:
        """Say it of this graph."""
        more = graph_facts(gm).more
        update_graph(gm, more={**more, self: value})


def fact(node: Node) -> Fact:
    """The fact of a node; an empty one if no pass has spoken yet."""
    found: Fact = node.meta.get(KEY, _EMPTY)
    return found


_EMPTY = Fact()


def update(node: Node, **changes: Any) -> Fact:
    """Replace fields of the node's fact."""
    node.meta[KEY] = dataclasses.replace(fact(node), **changes)
    return fact(node)


def graph_facts(gm: GraphModule) -> GraphFacts:
    """The facts of the whole graph."""
    found: GraphFacts = gm.meta[KEY]
    return found


def update_graph(gm: GraphModule, **changes: Any) -> None:
    """Replace facts of the whole graph."""
    gm.meta[KEY] = dataclasses.replace(graph_facts(gm), **changes)


def input_spec(node: Node) -> InputSpec:
    """What the placeholder `node` holds."""
    spec: InputSpec = node.meta["psg_fx_input"]
    return spec


def placeholders(gm: GraphModule) -> list[Node]:
    """The placeholders of the graph, in order."""
    return gm.graph.find_nodes(op="placeholder")


def outputs(gm: GraphModule) -> list[Node | None]:
    """The flat entries of the graph's output, aligned with `graph_facts(gm).outputs`."""
    (args,) = gm.graph.output_node().args
    assert isinstance(args, (tuple, list))
    return list(args)


def returned(gm: GraphModule) -> list[tuple[OutputSpec, Node | None]]:
    """The entries of the graph's output, each with what it holds."""
    return list(zip(graph_facts(gm).outputs, outputs(gm), strict=True))


def computed(gm: GraphModule, indices: Sequence[int], arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Some outputs of the graph for these inputs; only what leads to them is run."""
    part = GraphModule(gm, copy.deepcopy(gm.graph))
    found = outputs(part)
    part.graph.output_node().args = (tuple(found[index] for index in indices),)
    part.graph.eliminate_dead_code()
    part.recompile()
    return tuple(part(*arguments))


def expr(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression."""
    if isinstance(size, torch.SymInt):
        found: sympy.Expr = size.node.expr
        return found
    return sympy.Integer(size)


def shape(value: torch.Tensor) -> tuple[sympy.Expr, ...]:
    """The shape of a (fake) tensor as sympy expressions in the batch symbol."""
    return tuple(expr(s) for s in value.shape)


def at(expression: sympy.Expr, batch: sympy.Symbol, size: int) -> int:
    """The value of a size expression at one batch size."""
    return int(expression.subs(batch, size))


def at_one(size: Any) -> int:
    """A size where there is one sample, and one row."""
    found = size if isinstance(size, sympy.Expr) else expr(size)
    return int(found.subs(dict.fromkeys(found.free_symbols, 1)))


def is_differentiable(value: torch.Tensor) -> bool:
    """Whether a value of this dtype can have a gradient."""
    return value.is_floating_point() or value.is_complex()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an op's (possibly nested) result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def carries(node: Node) -> bool:
    """Whether the value of the node, or a part of it, holds the samples."""
    samples = fact(node).samples
    return any(axis is not None for axis in samples) if isinstance(samples, tuple) else samples is not None


def ancestors(nodes: Iterable[Node], through: Callable[[Node], bool] | None = None) -> set[Node]:
    """The nodes and all they are computed from; with `through`, only what is above nodes that it says yes to."""
    return _reached(nodes, lambda node: node.all_input_nodes if through is None or through(node) else ())


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and all that is computed from them."""
    return _reached(nodes, lambda node: node.users)


def _reached(nodes: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(following(node))
    return found
