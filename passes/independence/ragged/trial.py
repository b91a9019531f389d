"""Structure is tried: what masks and pointers say of a sample's rows must be what they say of that sample alone.

Structure is computed from ids, offsets, and numbers in the code, by any op.  That rows of two samples do not meet is
checked at every call; but `ids % 2`, or the number of all rows, would still be other numbers where a sample is alone.
So what meets values of samples is computed for some batches, and for each of their samples by itself.  What is the same
where the rows of a sample follow one another, and not where they lie apart, becomes a condition: they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.graph import facts
from psg_fx.graph.same_op import draws
from psg_fx.program.arguments.conditions import ROW_AXES

from ..refused import mixed
from ..run import run_on_cpu
from ..table import find
from ..values import Result, tensors
from .links import READS, WRITES, Link

_LENGTHS = ((2, 1, 4), (3, 5), (1, 1, 2, 3))
"""How many rows the samples of a batch have; along further axes, the same in another order."""
_LARGEST = 256
"""Up to this, batches have more samples, and samples more rows, than numbers in the code."""
_FIX = (
    "compare ids with ids and places with places: ids[:, None] == ids[None, :], arange(R)[:, None] >= arange(R); the "
    "place of a row within its sample, and the number of its rows, are inputs"
)


def try_structure(
    gm: GraphModule, known: Mapping[Node, Result], links: Sequence[Link], logged: Set[Node]
) -> list[Link]:  # fmt: skip
    """Refuse an op for which a batch has other masks or pointers than its samples have.  Returns axes whose rows must
    be in the order of their samples, as links.  logged: nodes of which no loss is made, such as the ids themselves.
    """
    met = [(node, n, None) for node in gm.graph.nodes if node not in logged for n in _meets(node, known)]
    met += [(link.node, link.by, link.other) for link in links if link.kind == "pointer" and known[link.by].structure]
    made = _made(gm, known)
    ordered: dict[sympy.Symbol, Link] = {}
    for (n, to), node in {(n, to): node for node, n, to in reversed(met)}.items():
        tried = _Tried(gm, n, to, made)
        if any(tried.differs(_batch(gm, lengths)) for lengths in (*_LENGTHS, *tried.beyond())):
            why = f"what %{n.name} says of a sample's rows is not what it says of that sample alone"
            raise mixed(node, why, _FIX)
        if any(tried.differs(_batch(gm, lengths, apart=True)) for lengths in _LENGTHS):
            counts = [s for s in (*facts.shape(n.meta["val"]), to) if s in facts.graph_facts(gm).rows]
            for count in counts:
                ordered.setdefault(count, Link("order", node, n, 0, count, count))
    return list(ordered.values())


def _meets(node: Node, known: Mapping[Node, Result]) -> Iterator[Node]:
    """The structure that an op with values of samples reads, other than for its shape or to point."""
    rule = find(node.target)
    if node.op != "call_function" or known[node].structure or rule is None or rule.shapes_only:
        return
    if node.target not in READS and node.target not in WRITES:
        yield from (n for n in node.all_input_nodes if known[n].structure and not known[n].index)


def _made(gm: GraphModule, known: Mapping[Node, Result]) -> set[Node]:
    """What is made of structure, of sizes, and of numbers in the code."""
    made: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or draws(node):
            continue
        rule = find(node.target)
        given = [n for n in node.all_input_nodes if tensors(n.meta.get("val"))]
        shapes = not tensors(node.meta.get("val")) or (rule is not None and rule.shapes_only)
        if shapes or known[node].structure or all(n in made or known[n].structure for n in given):
            made.add(node)
    return made


@dataclass(frozen=True)
class _Batch:
    """ids: whose each row is, by the symbol of the axis (of the samples, their numbers).  inputs: the ids and offsets
    by the names of their placeholders.
    """

    count: int
    ids: dict[sympy.Symbol, Tensor]
    inputs: dict[str, Tensor]

    def size(self, given: Any) -> int | None:
        """A size in numbers; None if it is one of anything else."""
        found = given.subs({symbol: len(own) for symbol, own in self.ids.items()})
        return None if found.free_symbols else int(found)

    def rows(self, symbol: sympy.Symbol, sample: int) -> Tensor:
        """The places of the rows of a sample."""
        return (self.ids[symbol] == sample).nonzero().flatten()

    def alone(self, gm: GraphModule, sample: int) -> _Batch:
        """One of its samples by itself."""
        return _with_inputs(gm, 1, {s: torch.zeros_like(own[own == sample]) for s, own in self.ids.items()})


def _batch(gm: GraphModule, lengths: Sequence[int], apart: bool = False) -> _Batch:
    """A batch of samples with these lengths.  apart: the rows of a sample do not follow one another."""
    info, count = facts.graph_facts(gm), len(lengths)
    ids = {info.batch: torch.arange(count)}
    for number, (symbol, axis) in enumerate(zip(info.rows, ROW_AXES.of(gm), strict=True)):
        own = [*lengths[number % count :], *lengths[: number % count]]
        found = torch.arange(count).repeat_interleave(torch.tensor(own))
        if apart and axis.tensor is not None and not axis.rows.offsets:
            found = torch.cat([found[k::3] for k in range(3)])
        ids[symbol] = found
    return _with_inputs(gm, count, ids)


def _with_inputs(gm: GraphModule, count: int, ids: dict[sympy.Symbol, Tensor]) -> _Batch:
    info, found = facts.graph_facts(gm), _Batch(count, ids, {})
    names = [s.name for s in map(facts.input_spec, facts.placeholders(gm)) if s.kind in ("input", "target")]
    for symbol, axis in zip(info.rows, ROW_AXES.of(gm), strict=True):
        if axis.tensor is not None:
            offsets = [0, *accumulate(ids[symbol].bincount(minlength=count).tolist())][: count + axis.closed]
            found.inputs[names[axis.tensor]] = torch.tensor(offsets) if axis.rows.offsets else ids[symbol]
    return found


class _Tried:
    """A mask, or a pointer `to` rows of an axis, as it is for batches and for their samples."""

    def __init__(self, gm: GraphModule, node: Node, to: Any, made: Set[Node]) -> None:
        self.gm, self.node, self.to, self.made = gm, node, to, made
        self.shape = facts.shape(node.meta["val"])
        self.above = facts.ancestors([node], through=made.__contains__)
        self.order = [n for n in gm.graph.nodes if n in self.above]
        self.of_one: dict[tuple[int, ...], Tensor | None] = {}

    def beyond(self) -> Iterator[Sequence[int]]:
        """Batches with more samples, and samples with more rows, than the numbers that the value is made with."""
        above = self.above & self.made
        numbers = [abs(a) for n in above for a in (*n.args, *n.kwargs.values()) if isinstance(a, (int, float))]
        if most := max((int(n) for n in numbers if 2 <= n <= _LARGEST), default=0):
            yield 2, most + 2
            yield [1 + k % 2 for k in range(most + 2)]

    def differs(self, batch: _Batch) -> bool:
        """Whether the part of a sample is another one than what that sample has alone."""
        whole = self.value(batch)
        if whole is None or any(size.free_symbols and size not in batch.ids for size in self.shape):
            return False  # rows of several axes, one behind the other, are pointed to by data
        for sample in range(batch.count):
            alone, part = self.alone(batch, sample), whole
            if alone is None:
                return False
            for d, size in enumerate(self.shape):
                if size.free_symbols:
                    part = part.index_select(d, batch.rows(size, sample))
            if self.to is not None:
                part = _own_places(part, batch, self.to, sample)
            if part.shape != alone.shape or not torch.equal(part, alone):
                return True
        return False

    def alone(self, batch: _Batch, sample: int) -> Tensor | None:
        """What one of its samples has by itself; of a pointer from 0 on."""
        lengths = tuple(len(batch.rows(symbol, sample)) for symbol in batch.ids)
        if lengths not in self.of_one:
            one = batch.alone(self.gm, sample)
            found = self.value(one)
            if found is not None and self.to is not None:
                found = found.where(found >= 0, found + len(one.ids[self.to]))
            self.of_one[lengths] = found
        return self.of_one[lengths]

    def value(self, batch: _Batch) -> Tensor | None:
        """Structure as it is for a batch; numbers of the samples are zero.  None: it does not run, has other sizes, or
        is made of pointers that are data.
        """
        values: dict[Node, Any] = {}
        for n in self.order:
            value = n.meta.get("val")
            if n not in self.made and isinstance(value, Tensor):
                given = batch.inputs.get(facts.input_spec(n).name) if n.op == "placeholder" else None
                sizes = [size for s in facts.shape(value) if (size := batch.size(s)) is not None]
                if len(sizes) < value.ndim or (given is None and _points(n, self.above)):
                    return None
                values[n] = (torch.zeros(sizes) if given is None else given.view(sizes)).to(value.dtype)
                continue
            try:
                values[n] = run_on_cpu(n, values)
            except (RuntimeError, IndexError, ValueError):
                return None
        found = values[self.node]
        return found if isinstance(found, Tensor) else None


def _own_places(pointer: Tensor, batch: _Batch, to: sympy.Symbol, sample: int) -> Tensor:
    """A pointer into all rows as one into those of a sample; -1 for those of others."""
    rows, count = batch.rows(to, sample), len(batch.ids[to])
    places = torch.full((count + 1,), -1).index_put((rows,), torch.arange(len(rows)))
    found = pointer.where(pointer >= 0, pointer + count)
    return places[found.where((found >= 0) & (found < count), count)].to(pointer.dtype)


def _points(node: Node, above: Set[Node]) -> bool:
    """Whether integers of the samples are read for more than their shape."""
    rules = [find(n.target) for n in node.users if n in above and tensors(n.meta.get("val"))]
    return not facts.is_differentiable(node.meta["val"]) and not all(r is not None and r.shapes_only for r in rules)
