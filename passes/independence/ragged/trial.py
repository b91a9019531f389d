"""Structure is tried: what masks and pointers say of a sample's rows must be what they say of that sample alone.

Structure is computed from ids, offsets, and numbers in the code, by any op.  That rows of two samples do not meet is
checked at every call; but `ids % 2`, or the number of all rows, would still be other numbers where a sample is alone.
So what meets values of samples is computed for batches of some sizes, and for each of their samples by itself.
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
from psg_fx.program.conditions import ROW_AXES

from ..table import find
from ..values import Result, mixed
from .links import READS, WRITES, Link

_LENGTHS = ((2, 1, 4), (3, 5), (1, 1, 2, 3))
"""How many rows the samples of a batch have; along further axes, the same in another order."""
_FIX = (
    "compare ids with ids and places with places: ids[:, None] == ids[None, :], arange(R)[:, None] >= arange(R); the "
    "place of a row within its sample, and the number of its rows, are inputs"
)


def try_structure(
    gm: GraphModule, known: Mapping[Node, Result], links: Sequence[Link], logged: Set[Node]
) -> None:  # fmt: skip
    """Refuse an op for which a batch has other masks or pointers than its samples have.  logged: nodes of which no loss
    is made, such as the ids themselves.
    """
    tried = [(node, n, None) for node in gm.graph.nodes if node not in logged for n in _meets(node, known)]
    tried += [(link.node, link.by, link.other) for link in links if link.kind == "pointer" and known[link.by].structure]
    batches = [_batch(gm, lengths) for lengths in _LENGTHS]
    for node, n, to in tried:
        if any(_differs(gm, known, batch, n, to) for batch in batches):
            raise mixed(node, f"what %{n.name} says of a sample's rows is not what it says of that sample alone", _FIX)


def _meets(node: Node, known: Mapping[Node, Result]) -> Iterator[Node]:
    """The structure that an op with values of samples reads, other than for its shape or to point."""
    rule = find(node.target)
    if node.op != "call_function" or known[node].structure or rule is None or rule.shapes_only:
        return
    if node.target not in READS and node.target not in WRITES:
        yield from (n for n in node.all_input_nodes if known[n].structure and not known[n].index)


@dataclass(frozen=True)
class _Batch:
    """lengths: how many rows each sample has along an axis, by the symbol of that (of the samples, 1 each).  inputs:
    the ids and offsets by the names of their placeholders.
    """

    lengths: dict[sympy.Symbol, list[int]]
    inputs: dict[str, Tensor]

    def size(self, given: Any) -> int | None:
        """A size in numbers; None if it is one of anything else."""
        found = given.subs({symbol: sum(own) for symbol, own in self.lengths.items()})
        return None if found.free_symbols else int(found)

    def rows(self, symbol: sympy.Symbol, sample: int) -> slice:
        """Where the rows of a sample lie."""
        start = sum(self.lengths[symbol][:sample])
        return slice(start, start + self.lengths[symbol][sample])


def _batch(gm: GraphModule, lengths: Sequence[int], sample: int | None = None) -> _Batch:
    """A batch of samples with these lengths, or one of its samples by itself."""
    info = facts.graph_facts(gm)
    names = [s.name for s in map(facts.input_spec, facts.placeholders(gm)) if s.kind in ("input", "target")]
    found = _Batch({info.batch: [1] * (len(lengths) if sample is None else 1)}, {})
    for number, (symbol, axis) in enumerate(zip(info.rows, ROW_AXES.of(gm), strict=True)):
        every = [*lengths[number % len(lengths) :], *lengths[: number % len(lengths)]]
        own = found.lengths[symbol] = every if sample is None else [every[sample]]
        if axis.tensor is not None:
            ids = [s for s, n in enumerate(own) for _ in range(n)]
            offsets = [0, *accumulate(own)][: len(own) + axis.closed]
            found.inputs[names[axis.tensor]] = torch.tensor(offsets if axis.rows.offsets else ids)
    return found


def _differs(gm: GraphModule, known: Mapping[Node, Result], batch: _Batch, node: Node, to: Any) -> bool:
    """Whether the part of a sample is another one than what that sample has alone.  to: which rows it points to."""
    whole, shape = _value(gm, known, batch, node), facts.shape(node.meta["val"])
    if whole is None or any(size.free_symbols and size not in batch.lengths for size in shape):
        return False  # rows of several axes, one behind the other, are pointed to by data
    symbols = [size if size.free_symbols else None for size in shape]
    lengths = next(iter(batch.lengths[s] for s in facts.graph_facts(gm).rows))
    for sample in range(len(lengths)):
        alone = _value(gm, known, _batch(gm, lengths, sample), node)
        if alone is None:
            return False
        part = whole[tuple(slice(None) if s is None else batch.rows(s, sample) for s in symbols)]
        if to is not None:
            count, rows = sum(batch.lengths[to]), batch.rows(to, sample)
            part = part.where(part >= 0, part + count) - rows.start
            alone = alone.where(alone >= 0, alone + rows.stop - rows.start)
        if part.shape != alone.shape or not torch.equal(part, alone):
            return True
    return False


def _value(gm: GraphModule, known: Mapping[Node, Result], batch: _Batch, node: Node) -> Tensor | None:
    """Structure as it is for a batch; numbers of the samples are zero.  None: it does not run, has other sizes, or is
    made of pointers that are data.
    """
    values: dict[Node, Any] = {}
    above = facts.ancestors([node], through=lambda n: _is_computed(n, known))
    for n in gm.graph.nodes:
        if n not in above:
            continue
        value = n.meta.get("val")
        if not _is_computed(n, known) and isinstance(value, Tensor):
            given = batch.inputs.get(facts.input_spec(n).name) if n.op == "placeholder" else None
            sizes = [size for s in facts.shape(value) if (size := batch.size(s)) is not None]
            if len(sizes) < value.ndim or (given is None and _points(n, above)):
                return None
            values[n] = (torch.zeros(sizes) if given is None else given.view(sizes)).to(value.dtype)
            continue
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), values.__getitem__)
        try:
            values[n] = n.target(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))
        except (RuntimeError, IndexError, ValueError):
            return None
    found = values[node]
    return found if isinstance(found, Tensor) else None


def _is_computed(node: Node, known: Mapping[Node, Result]) -> bool:
    """Whether a value is made of structure, or of numbers in the code: not of values of the samples."""
    if node.op != "call_function":
        return False
    plain = not isinstance(node.meta.get("val"), Tensor)
    return plain or known[node].structure or known[node].axes is None


def _points(node: Node, above: Set[Node]) -> bool:
    """Whether integers of the samples are read for more than their shape."""
    floats = facts.is_differentiable(node.meta["val"])
    return not floats and any(isinstance(n.meta.get("val"), Tensor) for n in node.users if n in above)
