"""What values must show at every call, written into the graph: one output with a number for each condition.

Each number is the first row at which samples would meet, -1 if there is none.  They are evaluated from ids, pointers
and masks alone, so that they can be had where the rest of the graph fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from psg_fx.errors import BadArgument, NotYetSupported
from psg_fx.graph import facts
from psg_fx.graph.facts import OutputSpec
from psg_fx.graph.same_op import alike
from psg_fx.graph.splicing import splice
from psg_fx.program.arguments.call import SAMPLES
from psg_fx.program.arguments.conditions import CONDITIONS, ROW_AXES, Condition
from psg_fx.source import locate

from ..arguments import op_name
from .links import Link

Piece = Callable[..., Tensor]


@dataclass(frozen=True)
class Check:
    """A condition, and how its number is computed: `piece(*inputs)`."""

    condition: Condition
    piece: Piece
    inputs: tuple[Node, ...]


def first_row(broken: Tensor) -> Tensor:
    """The number of the first row that is True, `[R]` -> `[]`; -1 for none."""
    end = torch.ones(1, dtype=torch.int64, device=broken.device)
    first = torch.cat([broken.to(torch.int64), end]).argmax()
    return torch.where(first == broken.shape[0], -1, first)


def add_conditions(gm: GraphModule, links: Sequence[Link]) -> None:
    """After: the last outputs are the ids of axes that had none, and "mixing" if anything is left to check."""
    if facts.graph_facts(gm).rows:
        Conditions(gm).add(links)


class Conditions:
    """Writes what is to be checked in one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.info = gm, facts.graph_facts(gm)
        self.axes = ROW_AXES.of(gm)
        self.carrier = next(n for n in facts.placeholders(gm) if facts.input_spec(n).name == SAMPLES)
        self.ids: dict[sympy.Symbol, Node] = {
            self.info.rows[int(spec.name)]: node
            for spec, node in facts.returned(gm) if spec.kind == "ids" and node is not None
        }  # fmt: skip
        self.numbers = alike(gm)
        for count, node in self.ids.items():
            if facts.shape(node.meta["val"]) != (count,):
                raise self.misfit(count, node)
        self.proven: list[str] = []

    def add(self, links: Sequence[Link]) -> None:
        """Conditions of all links, each once, and of the ids themselves."""
        checks = [check for k in range(len(self.axes)) for check in self.of_axis(k)]
        seen: dict[Any, Link] = {}
        for link in links:
            key = (link.kind, self.numbers[link.by], link.own, link.other, link.counts_back)
            if seen.setdefault(key, link) is link:
                checks += self.of_link(link)
        known = {self.info.rows.index(s): node for s, node in self.ids.items()}
        missing = [axis.label for k, axis in enumerate(self.axes) if k not in known]
        entries = [(s, n) for s, n in facts.returned(self.gm) if s.kind not in facts.ABOUT_ROWS]
        entries += [(OutputSpec("ids", str(k)), node) for k, node in known.items()]
        if checks:
            entries.append((OutputSpec("mixing", ""), self.written(checks)))
        self.gm.graph.output_node().args = (tuple(n for _, n in entries),)
        notes = (*self.info.notes, *self.proven, *(f"checked at every call: {c.condition}" for c in checks),
                 *(f"nothing points from or to the {label}" for label in missing))  # fmt: skip
        facts.update_graph(self.gm, outputs=tuple(s for s, _ in entries), notes=notes)
        CONDITIONS.put(self.gm, tuple(c.condition for c in checks))

    def label(self, count: sympy.Symbol) -> str:
        return "samples" if count == self.info.batch else self.axes[self.info.rows.index(count)].label

    def of_axis(self, number: int) -> list[Check]:
        """Ids are among 0..B-1, offsets in order."""
        axis, ids = self.axes[number], self.ids.get(self.info.rows[number])
        if ids is None:
            return []
        where = f"psg_fx.Rows({axis.rows})"
        in_range = Condition("ids", "ids", where, axis.label)

        def outside(ids: Tensor, samples: Tensor) -> Tensor:
            return first_row((ids < 0) | (ids >= samples.shape[0]))

        found = [Check(in_range, outside, (ids, self.carrier))]
        if not axis.rows.offsets:
            return found
        inputs = [n for n in facts.placeholders(self.gm) if facts.input_spec(n).kind in ("input", "target")]
        offsets = next(n for n in inputs if facts.input_spec(n).name == self.name_of_tensor(axis.tensor))
        closed = axis.closed

        def disordered(offsets: Tensor, ids: Tensor) -> Tensor:
            o = offsets.reshape(-1)
            place = torch.arange(o.shape[0], device=o.device)
            before = o[(place - 1).clamp(min=0)]  # not o[:-1], whose size B - 1 asks for whether there is one sample
            wrong = (o < before) | (o > ids.shape[0])
            wrong = wrong | ((place == 0) & (o != 0))
            return first_row(wrong | ((place == o.shape[0] - 1) & (o != ids.shape[0])) if closed else wrong)

        return [Check(Condition("offsets", "offsets", where, axis.label), disordered, (offsets, ids)), *found]

    def name_of_tensor(self, index: int | None) -> str:
        inputs = [facts.input_spec(n) for n in facts.placeholders(self.gm)]
        assert index is not None
        return [s.name for s in inputs if s.kind in ("input", "target")][index]

    def of_link(self, link: Link) -> list[Check]:
        """ids_S[p[t]] == ids_T[t]; a mask is closed wherever the ids of its two rows differ."""
        kind: Any = "mask" if link.kind in _PIECES else link.kind
        condition = Condition(kind, op_name(link.node), locate(link.node), self.label(link.own), self.label(link.other))
        if link.kind == "order":
            own = self.ids.get(link.own)
            return [] if own is None else [Check(condition, _turned, (own,))]
        if link.kind != "pointer":
            for count in (link.own, link.other):
                if count not in self.ids and count != self.info.batch:
                    raise self.unknown(replace(link, other=count))
            return [Check(condition, _PIECES[link.kind], (link.by, self.of(link.own), self.of(link.other)))]
        own, other = self.ids.get(link.own), self.ids.get(link.other)
        if own is None and link.own != self.info.batch:
            return self.define(link, condition)
        if link.other == self.info.batch and own is not None and self.is_ids(link.by, own):
            self.proven.append(f"proven: {self.label(link.own)} point to their own sample by their ids")
            return []
        if other is None and link.other != self.info.batch:
            raise self.unknown(link)
        dim = link.dim

        def elsewhere(pointer: Tensor, own: Tensor, other: Tensor) -> Tensor:
            return _elsewhere(pointer.movedim(dim, 0), own, other, link.counts_back)

        return [Check(condition, elsewhere, (link.by, self.of(link.own), self.of(link.other)))]

    def define(self, link: Link, condition: Condition) -> list[Check]:
        """Rows without ids belong to the sample of what they point to first."""
        if link.other not in self.ids and link.other != self.info.batch:
            raise self.unknown(link)
        if len(link.by.meta["val"].shape) != 1:
            raise self.unknown(link)
        target = self.of(link.other)
        sampled = link.other == self.info.batch

        def ids(pointer: Tensor, other: Tensor) -> Tensor:
            return pointer.to(torch.int64) if sampled else _at(other, pointer)

        self.ids[link.own] = self.splice(ids, (link.by, target))
        own, others = self.label(link.own), self.label(link.other)
        self.proven.append(
            f"by definition: {own} belong to the sample of the {others} that {condition.op} has them point to "
            f"({condition.where})"
        )
        inside = replace(condition, kind="pointer")

        def outside(pointer: Tensor, other: Tensor) -> Tensor:
            count = other.shape[0]
            return first_row((pointer < (-count if link.counts_back else 0)) | (pointer >= count))

        return [Check(inside, outside, (link.by, target))]

    def is_ids(self, pointer: Node, ids: Node) -> bool:
        """Whether a pointer is computed as the ids are."""
        return self.numbers.get(pointer) == self.numbers.get(ids, -1)

    def of(self, count: sympy.Symbol) -> Node:
        """The ids of an axis; for that of the samples, whose ids are their numbers, the input that counts them."""
        return self.carrier if count == self.info.batch else self.ids[count]

    def misfit(self, count: sympy.Symbol, ids: Node) -> BadArgument:
        shape = tuple(str(s).replace(str(self.info.batch), "B") for s in facts.shape(ids.meta["val"]))
        return BadArgument(
            f"there is not one id for each of the {self.label(count)}", where=f"the ids of the {self.label(count)}",
            why=f"they have the shape [{', '.join(shape)}], another one than [R]",
            fix="return the number of the sample of each row, in the order of the rows",
        )  # fmt: skip

    def unknown(self, link: Link) -> Exception:
        return NotYetSupported(
            f"of which sample the {self.label(link.other)} are is not known where {op_name(link.node)} needs it",
            where=locate(link.node), why="neither ids nor what they point to have been seen before",
            fix="give them ids: psg_fx.Rows(function of the inputs, dim)",
        )  # fmt: skip

    def written(self, checks: Sequence[Check]) -> Node:
        """`[K]`: the numbers of all checks."""
        inputs = list(dict.fromkeys(n for check in checks for n in check.inputs))

        def numbers(*values: Tensor) -> Tensor:
            known = dict(zip(inputs, values, strict=True))
            return torch.stack([check.piece(*(known[n] for n in check.inputs)) for check in checks])

        return self.splice(numbers, inputs)

    def splice(self, function: Callable[..., Tensor], inputs: Sequence[Node]) -> Node:
        """The function of these nodes, in front of the output."""
        out = self.gm.graph.output_node()
        found: Node = splice(self.gm, out, function, inputs, _checked)
        return found


def _checked(made: Node) -> None:
    facts.update(made, structure=True, proof="checked at the call")


def _ids(of: Tensor) -> Tensor:
    """Ids as they are; those of samples, of which a bool for each is given, are their numbers."""
    return torch.arange(of.shape[0], device=of.device) if of.dtype is torch.bool else of


def _at(other: Tensor, pointer: Tensor) -> Tensor:
    """other[p], with any number where p points outside."""
    end = torch.cat([other, other.new_zeros(1)])
    inside = (pointer >= -other.shape[0]) & (pointer < other.shape[0])
    place = torch.where(pointer < 0, pointer + other.shape[0], pointer)
    return end[torch.where(inside, place, other.shape[0])]


def _elsewhere(pointer: Tensor, own: Tensor, other: Tensor, counts_back: bool) -> Tensor:
    """The first row, along dim 0 of a pointer, that points outside or to a row of another sample."""
    own, other = _ids(own), _ids(other)
    inside = (pointer >= (-other.shape[0] if counts_back else 0)) & (pointer < other.shape[0])
    wrong = (_at(other, pointer) != own.reshape(-1, *[1] * (pointer.ndim - 1))) | ~inside
    return first_row(wrong.flatten(1).any(1) if wrong.ndim > 1 else wrong)


def _turned(ids: Tensor) -> Tensor:
    """The first row that comes behind one of a later sample."""
    return first_row(ids < ids.cummax(0).values)


def _weighs(weights: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """The first query in which a row of another sample has a weight."""
    return _crossing(weights != 0, _ids(own), _ids(other))


def _crossing(reached: Tensor, own: Tensor, other: Tensor) -> Tensor:
    crossed = reached & (own[:, None] != other[None, :])
    while crossed.ndim > 2:
        crossed = crossed.any(0)
    return first_row(crossed.any(1))


def _open(mask: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """The first query that may attend to a row of another sample."""
    own, other = _ids(own), _ids(other)
    if mask.dtype is torch.bool:
        reached = mask
    else:
        low = torch.finfo(mask.dtype).min / 2
        sees = mask.amax(-1, keepdim=True) > low / 2  # else softmax gives every row the same
        reached = (mask > low) | ((mask != -torch.inf) & ~sees)
    return _crossing(reached, own, other)


def _filled(mask: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """The first query in which a row of another sample is not filled."""
    return _crossing(mask == 0, _ids(own), _ids(other))


_PIECES: dict[str, Piece] = {"mask": _open, "weights": _weighs, "filled": _filled}


__all__ = ["add_conditions", "first_row"]
