"""The planner: for every parameter and everything asked of it, the cheapest set of trees under the cost model.

Trees of different asks share equal sub-networks, so they are chosen together: the gradient that a clipped sum reads is
not computed again for its norm.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import sympy

from psg_fx.algebra.ask import Ask, Contraction, Phase, ThroughTotal
from psg_fx.algebra.asks import Materialized, SquaredNorm, whole
from psg_fx.algebra.gradient import ParameterGradient
from psg_fx.algebra.network import Network
from psg_fx.planner.alike import LeavesOf, likeness
from psg_fx.planner.cost import Device
from psg_fx.planner.expr import Expr, dense, peak_bytes, rounds
from psg_fx.planner.methods import OFFERED, ROUNDED
from psg_fx.planner.plan import ParameterPlan, Part, Plan, kept_until_norms
from psg_fx.planner.trees import Concrete, trees
from psg_fx.tensors import product

_EXHAUSTIVE = 4000
"""Combinations of trees that are all compared; of more, those of promising trees, and else one question at a time."""
_KEPT = 24
"""Promising trees of a question: so many of the cheapest, and so many of those that share work with other questions."""
_LITTLE = 32 << 20
"""Bytes that an allocator has at hand."""


@dataclass(frozen=True)
class _Option:
    """A tree with the time of each of its nodes."""

    tree: Expr
    nodes: dict[Hashable, float]

    @property
    def seconds(self) -> float:
        return sum(self.nodes.values())


@dataclass(frozen=True)
class _Question:
    """A part whose tree is still open, and the trees that the device has for it, as if memory had no price."""

    ask: Ask
    contraction: Contraction
    options: list[_Option]


@dataclass(frozen=True)
class _Ways:
    """What to contract for a parameter: its terms directly, their sum once it is materialised (True), or either.

    each: none where the loss does not reach it.  reason: why there is no direct way.
    """

    gradient: ParameterGradient
    each: list[tuple[bool, list[_Question]]]
    reason: str


def plan_step(
    gradients: Iterable[ParameterGradient], asks: Sequence[Ask], device: Device, batch: sympy.Symbol, size: int,
    price: float | None = None,
) -> Plan:  # fmt: skip
    """Choose trees for every parameter at batch size `size`; a batch of one is planned as two, because axes of size 1
    have no role in a contraction and the plan serves every batch size.

    What is kept until the norms are known costs nothing as long as all of it together is little; only if it is not,
    everything is planned again with the device's price on it.  price: what is chosen costs so many seconds for a byte
    that is kept or that a tree holds at once, which are not told: the plan's seconds are those of the device.
    """
    size = max(size, 2)
    concrete, searched = _concrete(batch, size), dict[Hashable, _Searched]()
    ways = [_ways(gradient, asks, device, batch, concrete, searched) for gradient in gradients]
    found = tuple(_plan_parameter(each, 0.0, price) for each in ways)
    if device.kept and sum(_kept(p) for p in found) > _LITTLE:
        found = tuple(_plan_parameter(each, device.kept, price) for each in ways)
    return Plan(found, tuple(asks), device, batch, size, sum(p.seconds for p in found))


def _kept(plan: ParameterPlan) -> int:
    """Bytes that one parameter's plan keeps until the norms are known."""
    kept: dict[int, int] = {}
    for part in plan.parts:
        if part.ask.phase is Phase.AFTER_NORMS:
            kept |= kept_until_norms(part.tree)
    return sum(kept.values())


def _plan_parameter(ways: _Ways, kept: float, price: float | None) -> ParameterPlan:
    """The cheaper of its ways.  kept: seconds for a byte that is kept."""
    if not ways.each:
        return ParameterPlan(ways.gradient, False, (), 0.0, "the loss does not reach it: zero")
    chosen = [(total, *_choose(questions, kept, price)) for total, questions in ways.each]
    total, parts, seconds, _ = min(chosen, key=lambda way: way[3])
    return ParameterPlan(ways.gradient, total, parts, seconds, ways.reason or _why(parts, total))


def _concrete(batch: sympy.Symbol, size: int) -> Concrete:
    return functools.cache(lambda expression: int(sympy.sympify(expression).subs(batch, size)))


# --- what must be contracted ---------------------------------------------------------------------------------------

_Open = list[tuple[Ask, Contraction]]
_Searched = tuple[list[Network], list[list[_Option]]]
"""The networks of one parameter, and the trees that were found for each."""


def _ways(
    gradient: ParameterGradient, asks: Sequence[Ask], device: Device, batch: sympy.Symbol, concrete: Concrete,
    searched: dict[Hashable, _Searched],
) -> _Ways:  # fmt: skip
    """The sum of one term is that term.  searched: of parameters so far, by what those alike have in common."""
    if not gradient.terms:
        return _Ways(gradient, [], "")
    asked: list[tuple[bool, _Open]] = []
    direct, reason = _direct(gradient, asks)
    if direct is not None:
        asked.append((False, direct))
    if direct is None or len(gradient.terms) > 1:
        asked.append((True, _through_total(gradient, asks, batch)))
    rounding = device.rounded and any(ask.phase is Phase.AFTER_NORMS for ask in asks)
    questions = [question for _, questions in asked for question in questions]
    rounded = [rounding and (a.phase is Phase.AFTER_NORMS or isinstance(a, SquaredNorm)) for a, _ in questions]
    networks = [contraction.network for _, contraction in questions]
    key = (likeness(networks, concrete), tuple(rounded))
    if key not in searched:
        searched[key] = networks, [_trees(n, concrete, device, r) for n, r in zip(networks, rounded, strict=True)]
    options = iter(_of_alike(*searched[key], networks))
    each = [(total, [_Question(*question, next(options)) for question in questions]) for total, questions in asked]
    return _Ways(gradient, each, reason)


def _of_alike(searched: list[Network], options: list[list[_Option]], networks: list[Network]) -> list[list[_Option]]:
    """The trees of these networks, from those of others that are alike."""
    if networks is searched:
        return options
    moved = LeavesOf(searched, networks)
    return [[_moved(option, moved(option.tree)) for option in each] for each in options]


def _moved(option: _Option, tree: Expr) -> _Option:
    return _Option(tree, dict(zip(tree.nodes, option.nodes.values(), strict=True)))


def _direct(gradient: ParameterGradient, asks: Sequence[Ask]) -> tuple[_Open | None, str]:
    """Every ask as contractions of the terms themselves; None with the reason where one needs the sum first."""
    try:
        return [(ask, contraction) for ask in asks for contraction in ask.contractions(gradient)], ""
    except ThroughTotal as reason:
        return None, str(reason)


def _through_total(gradient: ParameterGradient, asks: Sequence[Ask], batch: sympy.Symbol) -> _Open:
    """Materialise the sum of all terms, then contract that one dense leaf."""
    found: _Open = [(Materialized(), contraction) for contraction in Materialized().contractions(gradient)]
    total = whole(gradient, batch)
    for ask in asks:
        if ask.samples and any(term.of_samples for term in gradient.terms):
            found += [(ask, contraction) for contraction in ask.contractions(gradient)]
        elif ask.phase is not Phase.GRADIENTS:
            found += [(ask, replace(contraction, terms=())) for contraction in ask.contractions(total)]
    return found


def _trees(network: Network, concrete: Concrete, device: Device, rounded: bool) -> list[_Option]:
    """Every tree that the device has the methods for, with the time of its nodes.  rounded: gradients may be, too."""
    wanted = (*OFFERED[device.offered], *(ROUNDED[device.offered] if rounded else ()))
    offered = [m for m in wanted if device.name in m.devices and (device.own_ops or not m.own_op)]
    known: dict[int, float] = {}

    def seconds(node: Expr) -> float:
        if node.key not in known:
            known[node.key] = node.seconds(device)
        return known[node.key]

    found = trees(network, concrete, offered, seconds) or trees(network, concrete, offered)
    if rounded:
        found = [tree for tree in found if _rounds_gradients_alone(tree, network)]
    return [_Option(t, {key: seconds(node) for key, node in t.nodes.items()}) for t in map(dense, found)]


def _rounds_gradients_alone(tree: Expr, network: Network) -> bool:
    """Whether nothing else is rounded: not a product on the way to one."""
    return all(set(node.axes) == set(network.order) for node in rounds(tree))


# --- choosing trees ------------------------------------------------------------------------------------------------


def _choose(questions: list[_Question], kept: float, price: float | None) -> tuple[tuple[Part, ...], float, float]:
    """The trees that together take least time, equal nodes counted once; their seconds, and those with the price."""
    each = [_priced(question, kept) for question in questions]
    chosen = _search(each if price is None else [_priced(question, price, price) for question in questions])
    union: dict[Hashable, float] = {}
    parts = []
    for question, options, found in zip(questions, each, chosen, strict=True):
        option = next(o for o in options if o.tree is found.tree)
        fresh = sum(seconds for key, seconds in option.nodes.items() if key not in union)
        union.update(option.nodes)
        others = tuple((o.tree, o.seconds) for o in options if o is not option)
        parts.append(Part(question.ask, question.contraction, option.tree, fresh, others))
    return tuple(parts), sum(union.values()), _together(chosen)


def _priced(question: _Question, kept: float, working: float = 0.0) -> list[_Option]:
    """Its trees, the fastest first, with the price of what each keeps if it must wait for the norms.

    working: seconds for a byte that a tree holds at once.
    """
    found = []
    for option in question.options:
        tree, nodes = option.tree, option.nodes
        if question.ask.phase is Phase.AFTER_NORMS and kept:
            nodes = nodes | {("kept", key): size * kept for key, size in kept_until_norms(tree).items()}
        if working:
            nodes = nodes | {("working", tree.key): peak_bytes(tree) * working}
        found.append(_Option(tree, nodes))
    return sorted(found, key=lambda option: option.seconds)


def _search(questions: list[list[_Option]]) -> list[_Option]:
    """Exhaustive where few combinations exist; else one question at a time until nothing improves."""
    if product(len(options) for options in questions) <= _EXHAUSTIVE:
        return list(min(itertools.product(*questions), key=_together))
    kept = [_promising(options, questions, k) for k, options in enumerate(questions)]
    if product(len(options) for options in kept) <= _EXHAUSTIVE:
        return list(min(itertools.product(*kept), key=_together))
    return min((_descend(kept, start) for start in _starts(kept)), key=_together)


def _union(options: Iterable[_Option]) -> dict[Hashable, float]:
    """The nodes of all, each once."""
    found: dict[Hashable, float] = {}
    for option in options:
        found.update(option.nodes)
    return found


def _together(options: Iterable[_Option]) -> float:
    return sum(_union(options).values())


def _promising(options: list[_Option], questions: list[list[_Option]], own: int) -> list[_Option]:
    """The cheapest trees, and the cheapest of those that share work with other questions."""
    elsewhere = {
        key for k, others in enumerate(questions) if k != own for o in others for key, s in o.nodes.items() if s > 0
    }
    sharing = [o for o in options if any(s > 0 and key in elsewhere for key, s in o.nodes.items())]
    return list({id(o): o for o in options[:_KEPT] + sharing[:_KEPT]}.values())


def _starts(questions: list[list[_Option]]) -> list[list[_Option]]:
    """Every question's own best; and its best if each node's time is split among all who could use it."""
    best = [options[0] for options in questions]
    pooled: dict[Hashable, int] = {}
    for options in questions:
        for key in {k for o in options for k, s in o.nodes.items() if s > 0}:
            pooled[key] = pooled.get(key, 0) + 1
    shared = [
        min(options, key=lambda o: sum(s / pooled.get(k, 1) for k, s in o.nodes.items())) for options in questions
    ]
    return [best, shared]


def _descend(questions: list[list[_Option]], start: list[_Option]) -> list[_Option]:
    chosen = list(start)
    for _ in range(4):
        before = list(chosen)
        for k, options in enumerate(questions):
            rest = _union(chosen[:k] + chosen[k + 1 :])
            chosen[k] = min(options, key=lambda o: sum(s for key, s in o.nodes.items() if key not in rest))
        if all(a is b for a, b in zip(before, chosen, strict=True)):
            break
    return chosen


def _why(parts: tuple[Part, ...], total: bool) -> str:
    """One phrase: the runner-up of the costliest part and how much slower it would be."""
    if total:
        return "the sum of its uses is materialised once and read by everything asked"
    part = max(parts, key=lambda p: p.seconds)
    own = str(part.tree)
    worse = next(((text, s) for tree, s in part.alternatives if (text := str(tree)) != own), None)
    if worse is None:
        return "the only tree"
    text, seconds = worse
    return f"{text}: {seconds * 1e6:.0f} µs against {part.seconds * 1e6:.0f} µs"
