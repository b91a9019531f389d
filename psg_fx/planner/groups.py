"""Parameters whose trees share work, such as the weight and the bias of a layer, and which of these groups are alike.

A plan is traced group by group: layers of the same kind and shape are the same computation on other values, so what
was traced for one is copied for all the others.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

from psg_fx.algebra.ask import Phase
from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.network import Kind, Leaf, Routed, Source
from psg_fx.algebra.prefix import sources
from psg_fx.planner.expr import ContractExpr, DenseExpr, Expr, LeafExpr, dense
from psg_fx.planner.plan import ParameterPlan, Part, Plan, reads_weights

_MADE = (Kind.GRADS, Kind.WEIGHTS)
"""What the evaluation of a plan makes for itself."""


@dataclass(frozen=True)
class Group:
    """Some parameters of a plan, in its order."""

    parameters: tuple[ParameterPlan, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Those of the parameters."""
        return tuple(p.gradient.name for p in self.parameters)

    @cached_property
    def totals(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient is materialised first and read by everything else."""
        return tuple(p.gradient.name for p in self.parameters if p.total)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The values of the joint graph and the inputs that are read, in the order of their first use."""
        leaves = (n.leaf for part in self._parts() for n in part.tree.nodes.values() if isinstance(n, LeafExpr))
        found = [source for leaf in leaves for source in leaf.sources if source.kind not in _MADE]
        prefixes = [term.prefix for p in self.parameters for term in p.gradient.terms if not term.prefix.trivial]
        return tuple(dict.fromkeys(found + [source for prefix in prefixes for source in sources(prefix)]))

    @cached_property
    def handed(self) -> tuple[int, ...]:
        """Keys of the nodes that are computed before the weights are known and read after."""
        parts = list(self._parts())
        nodes = [n for part in parts if not _reads_weights(part) for n in part.tree.nodes.values()]
        kept = [n for n in nodes if not isinstance(n.arg.form, Routed)]
        early = {n.key for n in kept} | {dense(n).key for n in kept if isinstance(n, ContractExpr)}
        late = [part.tree for part in parts if _reads_weights(part)]
        return tuple(dict.fromkeys(key for tree in late for key in _first_met(tree, early)))

    @cached_property
    def signature(self) -> Hashable:
        """Equal for groups that are the same computation, whatever their parameters and sources are called."""
        writer = _Signature(self)
        told_apart = self.names if not all(part.ask.nameless for part in self._parts()) else ()
        parameters = [
            (p.total, writer.gradient(p.gradient), tuple(writer.part(part) for part in p.parts))
            for p in self.parameters
        ]
        return (told_apart, *parameters)

    def _parts(self) -> Iterator[Part]:
        return (part for p in self.parameters for part in p.parts)


def _first_met(expr: Expr, keys: Container[int]) -> Iterator[int]:
    """Those of the keys that a tree leads to, none through another."""
    if expr.key in keys:
        yield expr.key
        return
    for child in expr.children:
        yield from _first_met(child, keys)


def groups(plan: Plan) -> list[Group]:
    """The parameters of the plan, those together whose trees have a contraction in common, in the plan's order."""
    home: dict[int, list[ParameterPlan]] = {}
    found: dict[int, list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        keys = _work(parameter)
        together = {id(home[key]): home[key] for key in keys if key in home}
        group = [p for other in together.values() for p in other] + [parameter]
        for other in together:
            del found[other]
        found[id(group)] = group
        home |= {key: group for p in group for key in _work(p)}
    order = {id(parameter): k for k, parameter in enumerate(plan.parameters)}
    ordered = [sorted(group, key=lambda p: order[id(p)]) for group in found.values()]
    return [Group(tuple(group)) for group in sorted(ordered, key=lambda group: order[id(group[0])])]


def _work(parameter: ParameterPlan) -> set[int]:
    """Keys of the nodes whose work is worth sharing; those that read weights are never shared between parameters."""
    nodes = {key: node for part in parameter.parts for key, node in part.tree.nodes.items()}
    return {
        key for key, node in nodes.items() if isinstance(node, (ContractExpr, DenseExpr)) and not reads_weights(node)
    }


def _reads_weights(part: Part) -> bool:
    """Whether it is computed once the weights of the samples are known."""
    return part.ask.phase >= Phase.WEIGHTED


class _Signature:
    """Writes trees with numbers in place of names."""

    def __init__(self, group: Group) -> None:
        self._sources: dict[Source, Hashable] = {name: k for k, name in enumerate(group.sources)}
        self._sources |= {Source(Kind.GRADS, name): ("grads", k) for k, name in enumerate(group.names)}
        self._nodes: dict[int, int] = {}

    def gradient(self, gradient: ParameterGradient) -> Hashable:
        """The parameter without its name, and all its uses."""
        return (gradient.shape, gradient.dtype, tuple(self.term(term, gradient.name) for term in gradient.terms))

    def term(self, term: Term, parameter: str) -> Hashable:
        """A use; one whose operand is computed from the parameter is like no other, not even like that of another
        parameter that the operand is computed from.
        """
        g = term.network
        leaves = tuple((leaf.axes, self._leaf(leaf)) for leaf in g.leaves)
        made = None if term.prefix.trivial else (id(term.prefix), parameter)
        return (term.kinds, term.shape, g.out, g.scale, leaves, made)

    def part(self, part: Part) -> Hashable:
        """Everything that its evaluation depends on."""
        contraction = part.contraction
        network = contraction.network
        return (
            part.ask, contraction.terms, contraction.scale, network.scale, network.out, network.leaves[0].dtype,
            self._tree(part.tree),
        )  # fmt: skip

    def _tree(self, expr: Expr) -> Hashable:
        if expr.key in self._nodes:
            return (self._nodes[expr.key], expr.axes)
        self._nodes[expr.key] = len(self._nodes)
        children = tuple(self._tree(child) for child in expr.children)
        sizes = tuple(expr.sizes[axis] for axis in expr.axes)
        return (type(expr), expr.axes, sizes, expr.dtype, children, self._own(expr))

    def _own(self, expr: Expr) -> Hashable:
        if isinstance(expr, LeafExpr):
            return self._leaf(expr.leaf)
        if isinstance(expr, ContractExpr):
            p = expr.pair
            sizes = tuple((x, p.sizes[x]) for x in p.everything)
            return (expr.method.name, p.out, p.a, p.b, p.same, p.self_product, sizes)
        return None

    def _leaf(self, leaf: Leaf) -> Hashable:
        return (tuple(self._sources.get(s, s) for s in leaf.sources), leaf.recipe, leaf.form, leaf.sizes, leaf.dtype)
