"""What the planner decides: for each parameter the trees that compute what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from psg_fx.algebra.ask import Ask, Contraction
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.algebra.members import Grouping, members_of
from psg_fx.algebra.network import Kind, Source
from psg_fx.graph.facts import Entry
from psg_fx.planner.cost import Device
from psg_fx.planner.expr import Expr, LeafExpr


@dataclass(frozen=True)
class Part:
    """One contraction that an ask needs, and the tree chosen for it.

    contraction: its network, and which terms of the parameter it contracts; none for the gradient in memory.
    alternatives: other trees with their predicted seconds, cheapest first.
    """

    ask: Ask
    contraction: Contraction
    tree: Expr
    seconds: float
    alternatives: tuple[tuple[Expr, float], ...] = ()


@dataclass(frozen=True)
class ParameterPlan:
    """How everything asked of one parameter is computed.

    total: the gradient is materialised as the sum of all its terms first, and the other asks read that.
    parts: in the order of computation.  seconds: predicted, shared nodes counted once.
    """

    gradient: ParameterGradient
    total: bool
    parts: tuple[Part, ...]
    seconds: float
    why: str


@dataclass(frozen=True)
class Plan:
    """The plan of a whole step for `size` samples.

    part: if memory is bounded, so many samples run at once.  cut: how many the whole batch had, if it had more.
    need: the bytes that one part allocates, predicted.  grouping: of the samples; then the plan's samples are these
    groups.
    rows: of each axis of rows, how many there are, and how many the largest sample (or group) has if they may be put
    in order.
    """

    parameters: tuple[ParameterPlan, ...]
    asks: tuple[Ask, ...]
    device: Device
    batch: sympy.Symbol
    size: int
    seconds: float = field(default=0.0)
    part: int | None = None
    cut: int = 0
    need: int = 0
    grouping: Grouping | None = None
    rows: tuple[tuple[int, int | None], ...] = ()

    @property
    def samples(self) -> int:
        """How many samples it is for, of which `size` counts the groups."""
        return self.size if self.grouping is None else self.grouping.samples

    @property
    def gathered(self) -> tuple[int, ...]:
        """The axes of which some rows are brought in order of their samples (or groups)."""
        return tuple(k for k in range(len(self.rows)) if self.reads(members_of(k)))

    def reads(self, source: Source) -> bool:
        """Whether a leaf of some gradient is built from it."""
        terms = [term for parameter in self.parameters for term in parameter.gradient.terms]
        return any(source in leaf.sources for term in terms for leaf in term.network.leaves)


PLAN = Entry[Plan]("plan")
"""Set by plan."""


def kept_until_norms(tree: Expr) -> dict[int, int]:
    """Bytes of what is computed before the weights are known and read after.  Activations are alive anyway."""
    kept: dict[int, int] = {}
    for node in tree.nodes.values():
        if reads_weights(node):
            for child in node.children:
                if not reads_weights(child) and not _is_alive(child):
                    kept[child.key] = child.bytes
    return kept


def _is_alive(expr: Expr) -> bool:
    """Whether it is an activation as it is stored."""
    return isinstance(expr, LeafExpr) and set(expr.leaf.kinds) - {Kind.GIVEN} == {Kind.ACTIVATION}


def reads_weights(expr: Expr) -> bool:
    """Whether the per-sample weights are among the leaves."""
    return any(isinstance(n, LeafExpr) and Kind.WEIGHTS in n.leaf.kinds for n in expr.nodes.values())
