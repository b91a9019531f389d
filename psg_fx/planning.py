"""The planner: for every parameter and everything asked of it, the cheapest set of trees under the cost model.

Trees of different asks share equal sub-networks, so they are chosen together: the gradient that a clipped sum reads is
not computed again for its norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch

from psg_fx.cost import Device, product
from psg_fx.gradient import ParameterGradient, Term
from psg_fx.network import BATCH, Leaf, Network
from psg_fx.paths import Expr, LeafExpr, dense, trees
from psg_fx.quantity import Ask, Materialized, SquaredNorm, Weighted, sq_norm_pairs, weighted

_EXHAUSTIVE = 4000
_KEPT = 24


@dataclass(frozen=True)
class Part:
    """One contraction that an ask needs, and the tree chosen for it.

    terms: which terms of the parameter it contracts.  scale: its factor in the sum over parts.
    alternatives: other trees with their predicted seconds, cheapest first.
    """

    ask: Ask
    terms: tuple[int, ...]
    network: Network
    scale: float
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
    """The plan of a whole step."""

    parameters: tuple[ParameterPlan, ...]
    asks: tuple[Ask, ...]
    device: Device
    batch: sympy.Symbol
    size: int
    seconds: float = field(default=0.0)


@dataclass(frozen=True)
class _Option:
    """A tree with the time of each of its nodes."""

    tree: Expr
    nodes: dict[int, float]

    @property
    def seconds(self) -> float:
        return sum(self.nodes.values())


@dataclass(frozen=True)
class _Question:
    """A part whose tree is still open."""

    ask: Ask
    terms: tuple[int, ...]
    network: Network
    scale: float
    options: list[_Option]


def plan_step(
    gradients: Iterable[ParameterGradient], asks: Sequence[Ask], device: Device, batch: sympy.Symbol, size: int
) -> Plan:
    """Choose trees for every parameter at batch size `size`; a batch of one is planned as two, because axes of size 1
    have no role in a contraction and the plan serves every batch size.

    What is kept until the norms are known costs nothing as long as all of it together fits into the memory that the
    allocator hands round; only if it does not, everything is planned again with a price on it.
    """
    size, gradients = max(size, 2), list(gradients)
    free = replace(device, kept=0.0)
    found = tuple(plan_parameter(g, asks, free, batch, size) for g in gradients)
    if device.kept and sum(_kept(p) for p in found) > device.reused:
        found = tuple(plan_parameter(g, asks, device, batch, size) for g in gradients)
    return Plan(found, tuple(asks), device, batch, size, sum(p.seconds for p in found))


def _kept(plan: ParameterPlan) -> int:
    """Bytes that one parameter's plan keeps until the norms are known."""
    kept: dict[int, int] = {}
    for part in plan.parts:
        if isinstance(part.ask, Weighted) and part.ask.late:
            kept |= _kept_until_norms(part.tree)
    return sum(kept.values())


def plan_parameter(
    gradient: ParameterGradient, asks: Sequence[Ask], device: Device, batch: sympy.Symbol, size: int
) -> ParameterPlan:
    """The cheaper of two ways: contract the terms directly, or materialise their sum and contract that."""
    concrete = _concrete(batch, size)
    if not gradient.terms:
        return ParameterPlan(gradient, False, (), 0.0, "the loss does not reach it: zero")
    ways = []
    direct, reason = _direct(gradient, asks)
    if direct is not None:
        ways.append((False, *_choose(direct, concrete, device)))
    if direct is None or len(gradient.terms) > 1:
        ways.append((True, *_choose(_through_total(gradient, asks, batch), concrete, device)))
    total, parts, seconds = min(ways, key=lambda way: way[2])
    why = reason if direct is None else _why(parts, total)
    return ParameterPlan(gradient, total, parts, seconds, why)


def _concrete(batch: sympy.Symbol, size: int) -> Callable[[sympy.Expr], int]:
    return lambda expression: int(sympy.sympify(expression).subs(batch, size))


# --- what must be contracted ---------------------------------------------------------------------------------------

_Open = list[tuple[Ask, tuple[int, ...], Network, float]]


def _direct(gradient: ParameterGradient, asks: Sequence[Ask]) -> tuple[_Open | None, str]:
    """Every ask as contractions of the terms themselves; None with the reason where norms need the sum first."""
    terms = gradient.terms
    found: _Open = []
    for ask in asks:
        if isinstance(ask, SquaredNorm):
            reason = why_not_direct(terms)
            if reason:
                return None, reason
            pairs = sq_norm_pairs(tuple(t.network for t in terms))
            found += [(ask, (k, l), network, scale) for k, l, scale, network in pairs if overlap(terms[k], terms[l])]
        else:
            found += [(ask, (k,), _linear(term.network, ask, term), 1.0) for k, term in enumerate(terms)]
    return found, ""


def _linear(network: Network, ask: Ask, term: Term) -> Network:
    if isinstance(ask, Materialized):
        return network
    assert isinstance(ask, Weighted)
    return weighted(network, weights_leaf(ask.weights, network) if ask.weights else None)


def weights_leaf(name: str, network: Network) -> Leaf:
    """The per-sample weights c[b] as an operand."""
    return Leaf("c", (f"weights:{name}",), "weights", (BATCH,), (network.sizes[BATCH],), dtype=network.leaves[0].dtype)


def why_not_direct(terms: tuple[Term, ...]) -> str:
    """Why inner products of the terms are not those of the parameter's gradient, or ""."""
    for term in terms:
        if not term.prefix.selects:
            made_by = "·".join(term.prefix.ops) or "its use"
            return f"{made_by} before the site is not a selection: gradients are pulled back first"
    for first, term in itertools.combinations(terms, 2):
        if term.prefix.operand != first.prefix.operand and not _same_selection(term, first):
            if disjoint(term, first):
                continue
            return "its uses select different elements: gradients are pulled back first"
        if _out_sizes(term) != _out_sizes(first):
            return "its uses see it in different shapes: gradients are summed first"
    return ""


def _same_selection(one: Term, two: Term) -> bool:
    return one.prefix.trivial and two.prefix.trivial


def overlap(one: Term, two: Term) -> bool:
    """Whether two terms meet in any element of the parameter."""
    if one is two or one.prefix.operand == two.prefix.operand or _same_selection(one, two):
        return True
    return not disjoint(one, two)


def disjoint(one: Term, two: Term) -> bool:
    """Whether the two terms select different elements of the parameter: their inner product is zero."""
    a, b = _selected(one), _selected(two)
    return a is not None and b is not None and not bool(torch.isin(a, b).any())


def _selected(term: Term) -> torch.Tensor | None:
    """Which elements of the parameter the prefix selects, found by running it on their indices."""
    prefix = term.prefix
    if prefix.trivial or prefix.graph is None or not prefix.selects:
        return None
    (node,) = [n for n in prefix.graph.graph.nodes if n.op == "placeholder"]
    shape = tuple(int(s) for s in node.meta["val"].shape)
    index = torch.arange(product(shape), dtype=torch.float64).reshape(shape)
    if any(op == "_to_copy" for op in prefix.ops):
        return None
    selected: torch.Tensor = prefix.graph(index).flatten()
    return selected


def _out_sizes(term: Term) -> tuple[sympy.Expr, ...]:
    sizes = term.network.sizes
    return tuple(sizes[a] for a in term.network.out)


def _through_total(gradient: ParameterGradient, asks: Sequence[Ask], batch: sympy.Symbol) -> _Open:
    """Materialise the sum of all terms, then contract that one dense leaf."""
    found: _Open = [(Materialized(), (k,), term.network, 1.0) for k, term in enumerate(gradient.terms)]
    leaf = total_leaf(gradient, batch)
    whole = Network((leaf,), leaf.axes)
    for ask in asks:
        if isinstance(ask, SquaredNorm):
            found += [(ask, (), network, scale) for _, _, scale, network in sq_norm_pairs((whole,))]
        elif isinstance(ask, Weighted):
            found.append((ask, (), weighted(whole, weights_leaf(ask.weights, whole) if ask.weights else None), 1.0))
    return found


def total_leaf(gradient: ParameterGradient, batch: sympy.Symbol) -> Leaf:
    """The materialised gradient g[b,p] as an operand."""
    size = sympy.Integer(product(gradient.shape))
    return Leaf("g", (f"grads:{gradient.name}",), "total", (BATCH, "p"), (batch, size), dtype=gradient.dtype,
                build=lambda g: g.reshape(g.shape[0], -1))  # fmt: skip


# --- choosing trees ------------------------------------------------------------------------------------------------


def _choose(asked: _Open, concrete: Callable[[sympy.Expr], int], device: Device) -> tuple[tuple[Part, ...], float]:
    """The trees that together take least time, equal nodes counted once."""
    questions = [
        _Question(
            ask, terms, network, scale, _options(network, concrete, device, isinstance(ask, Weighted) and ask.late)
        )
        for ask, terms, network, scale in asked
    ]
    chosen = _search([q.options for q in questions])
    union: dict[int, float] = {}
    parts = []
    for question, option in zip(questions, chosen, strict=True):
        fresh = sum(seconds for key, seconds in option.nodes.items() if key not in union)
        union.update(option.nodes)
        others = tuple((o.tree, o.seconds) for o in question.options if o is not option)
        parts.append(Part(question.ask, question.terms, question.network, question.scale, option.tree, fresh, others))
    return tuple(parts), sum(union.values())


def _options(
    network: Network, concrete: Callable[[sympy.Expr], int], device: Device, late: bool = False
) -> list[_Option]:
    """Every tree with the time of its nodes, and of what it keeps if it must wait for the norms (`late`)."""
    found = []
    for tree in trees(network, concrete):
        tree = dense(tree)
        nodes = {key: node.seconds(device) for key, node in tree.nodes().items()}
        if late:
            nodes |= {-1 - key: size * device.kept for key, size in _kept_until_norms(tree).items()}
        found.append(_Option(tree, nodes))
    return sorted(found, key=lambda option: option.seconds)


def _kept_until_norms(tree: Expr) -> dict[int, int]:
    """Bytes of what is computed before the weights are known and read after.  Activations are alive anyway."""
    kept: dict[int, int] = {}
    for node in tree.nodes().values():
        if reads_weights(node):
            for child in node.children:
                if not reads_weights(child) and not str(child).startswith(("x", "patches(x)", "onehot")):
                    kept[child.key] = int(product(child.sizes[a] for a in child.axes)) * child.dtype.itemsize
    return kept


def reads_weights(expr: Expr) -> bool:
    """Whether the per-sample weights are among the leaves."""
    return any(isinstance(n, LeafExpr) and n.leaf.sources[0].startswith("weights:") for n in expr.nodes().values())


def _search(questions: list[list[_Option]]) -> list[_Option]:
    """Exhaustive where few combinations exist; else one question at a time until nothing improves."""
    if product(len(options) for options in questions) <= _EXHAUSTIVE:
        return list(min(itertools.product(*questions), key=_together))
    kept = [_promising(options, questions, k) for k, options in enumerate(questions)]
    if product(len(options) for options in kept) <= _EXHAUSTIVE:
        return list(min(itertools.product(*kept), key=_together))
    return min((_descend(kept, start) for start in _starts(kept)), key=_together)


def _together(options: Iterable[_Option]) -> float:
    union: dict[int, float] = {}
    for option in options:
        union.update(option.nodes)
    return sum(union.values())


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
    pooled: dict[int, int] = {}
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
            rest: dict[int, float] = {}
            for other in chosen[:k] + chosen[k + 1 :]:
                rest.update(other.nodes)
            chosen[k] = min(options, key=lambda o: sum(s for key, s in o.nodes.items() if key not in rest))
        if all(a is b for a, b in zip(before, chosen, strict=True)):
            break
    return chosen


def _why(parts: tuple[Part, ...], total: bool) -> str:
    """One phrase: the runner-up of the costliest part and how much slower it would be."""
    if total:
        return "the sum of its uses is materialised once and read by everything asked"
    part = max(parts, key=lambda p: p.seconds)
    worse = [(tree, s) for tree, s in part.alternatives if str(tree) != str(part.tree)]
    if not worse:
        return "the only tree"
    tree, seconds = worse[0]
    return f"{tree}: {seconds * 1e6:.0f} µs against {part.seconds * 1e6:.0f} µs"
