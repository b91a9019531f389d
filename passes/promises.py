"""What each stage of a graph promises.  Every check is linear in the graph or the plan."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from psg_fx.algebra.ask import Linear, Phase, Quadratic
from psg_fx.algebra.asks import Materialized
from psg_fx.algebra.gradient import GRADIENTS, ParameterGradient, Term, merge_terms
from psg_fx.algebra.network import BATCH, Kind, Source
from psg_fx.algebra.prefix import sources
from psg_fx.algebra.site import PREFIXES, READ, SITES, Site, Value, read_by_networks
from psg_fx.graph import facts
from psg_fx.graph.facts import fact
from psg_fx.graph.nodes import is_detach
from psg_fx.graph.same_op import computation
from psg_fx.graph.stages import Stage, broken, promise
from psg_fx.graph.strides import reads_strides
from psg_fx.op_table import known
from psg_fx.planner.expr import LeafExpr
from psg_fx.planner.plan import PLAN, ParameterPlan, Part, Plan
from psg_fx.torch_private.ops import writes

aten = torch.ops.aten


@promise(*Stage)
def described(gm: GraphModule) -> None:
    """Every placeholder and every output says what it holds."""
    for node in facts.placeholders(gm):
        if "psg_fx_input" not in node.meta:
            raise broken("every placeholder has an InputSpec", gm, node)
    if len(facts.outputs(gm)) != len(facts.graph_facts(gm).outputs):
        raise broken("every output has an OutputSpec", gm)


@promise(*Stage)
def functional(gm: GraphModule) -> None:
    """No op writes into a tensor."""
    for node in gm.graph.nodes:
        if writes(node.target):
            raise broken("no op writes into a tensor", gm, node)


@promise(*Stage)
def any_batch(gm: GraphModule) -> None:
    """The batch size is a symbol: nothing has fixed it to the size it was traced with."""
    batch = facts.graph_facts(gm).batch
    for node in facts.placeholders(gm):
        dim = facts.input_spec(node).samples
        if dim is not None and facts.expr(node.meta["val"].shape[dim]) != batch:
            raise broken("the batch size stays a symbol", gm, node)


@promise(Stage.CAPTURED, Stage.BATCHED, Stage.UNREDUCED, Stage.SITED)
def captured(gm: GraphModule) -> None:
    """No op reads strides: where the graph is run again, values may lie otherwise in memory."""
    for node in gm.graph.nodes:
        if reads_strides(node):
            raise broken("no op reads strides", gm, node)


@promise(Stage.BATCHED, Stage.UNREDUCED, Stage.SITED)
def batched(gm: GraphModule) -> None:
    """Every op has a fact about its samples, with a proof."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and facts.KEY not in node.meta:
            raise broken("every op has a fact about its samples", gm, node)


@promise(Stage.UNREDUCED, Stage.SITED)
def unreduced(gm: GraphModule) -> None:
    """The loss is one number per sample, and nothing that leads to it is reduced over the samples."""
    losses = []
    for spec, node in facts.returned(gm):
        if spec.kind == "loss":
            if node is None or fact(node).samples != facts.SampleAxis(0):
                raise broken("the loss carries the samples in dim 0", gm, node)
            losses.append(node)
    for node in facts.ancestors(losses):
        if fact(node).reduced:
            raise broken("nothing reduced over the samples leads to the loss", gm, node)


@promise(Stage.SITED)
def sited(gm: GraphModule) -> None:
    """Every path from a tracked parameter to the loss starts at one site, and every site knows how its operands are
    made of parameters.
    """
    prefixes = PREFIXES.of(gm)
    made_of: dict[Node, frozenset[str]] = {}
    for node in gm.graph.nodes:
        made_of[node] = _tracked(node, made_of)
        if node.op == "output":
            return
        meets = bool(made_of[node]) and node.op == "call_function" and facts.carries(node)
        if (fact(node).site == node.name) != meets or bool(fact(node).site) != meets:
            raise broken("a parameter meets the samples at a site, and nowhere else", gm, node)
        if meets:
            for operand in node.all_input_nodes:
                said = frozenset(prefixes[operand.name].parameters if operand.name in prefixes else ())
                if made_of[operand] and said != made_of[operand]:
                    raise broken("a site knows how its operands are made of parameters", gm, node)
            made_of[node] = frozenset()
        if fact(node).params != made_of[node]:
            raise broken("what is made of parameters says of which", gm, node)


def _tracked(node: Node, made_of: dict[Node, frozenset[str]]) -> frozenset[str]:
    """The tracked parameters whose gradients pass through the node's inputs, none of them a site."""
    if node.op == "placeholder":
        spec = facts.input_spec(node)
        return frozenset([spec.name] if spec.tracked else [])
    stops = is_detach(node) or fact(node).reduced
    stops = stops or known(node.target).undifferentiated
    if stops or not any(map(facts.is_differentiable, facts.tensors(node.meta.get("val")))):
        return frozenset()
    return frozenset().union(*(made_of[n] for n in node.all_input_nodes))


@promise(Stage.JOINT, Stage.NETWORKED, Stage.MERGED, Stage.PLANNED)
def differentiated(gm: GraphModule) -> None:
    """What the sites read and the cotangents of their outputs are outputs of the graph, of the shapes and dtypes that
    the sites say; nothing else is differentiated, no parameter among it.
    """
    info, values = facts.graph_facts(gm), read_by_networks(gm)
    wanted: dict[Source, Value] = {}
    for site in SITES.of(gm):
        wanted |= {value.source: value for value in site.values}
        for k, (output, cotangent) in enumerate(zip(site.outputs, site.cotangents, strict=True)):
            if cotangent is not None and output is not None:
                wanted[Source(Kind.COTANGENT, f"{site.name}.{k}")] = output
    for source, value in wanted.items():
        node = values.get(source)
        if node is None:
            raise broken(f"what a site reads is an output, {source} too", gm)
        found = node.meta["val"]
        if found.dtype != value.dtype or not _same_sizes(facts.shape(found), value.shape, info.batch):
            raise broken(f"{source} has the shape and dtype that its site says", gm, node)
    drawn = {source for site in SITES.of(gm) for operand in site.operands for source in sources(operand.prefix)}
    for source, node in values.items():
        if source not in wanted and source not in drawn:
            raise broken("nothing is differentiated but what sites make", gm, node)


def _same_sizes(a: tuple[sympy.Expr, ...], b: tuple[sympy.Expr, ...], batch: sympy.Symbol) -> bool:
    """Whether two shapes are equal, however they are written."""
    if a == b:
        return True
    return len(a) == len(b) and all(
        facts.at(x, batch, n) == facts.at(y, batch, n) for x, y in zip(a, b, strict=True) for n in (2, 3, 5)
    )


@promise(Stage.NETWORKED, Stage.MERGED, Stage.PLANNED)
def networked(gm: GraphModule) -> None:
    """Every tracked parameter has a gradient, with each of its uses in one term; its networks read what there is."""
    gradients = GRADIENTS.of(gm)
    specs = [facts.input_spec(node) for node in facts.placeholders(gm)]
    if set(gradients) != {spec.name for spec in specs if spec.tracked}:
        raise broken("every tracked parameter has a gradient", gm)
    known = {*read_by_networks(gm), *(Source(Kind.PLACEHOLDER, node.name) for node in facts.placeholders(gm))}
    uses = _uses(SITES.of(gm))
    for name, gradient in gradients.items():
        if Counter(site for term in gradient.terms for site in term.sites) != uses.get(name, Counter()):
            raise broken(f"every use of {name} is in one term", gm)
        for term in gradient.terms:
            if not known.issuperset(source for leaf in term.network.leaves for source in leaf.sources):
                raise broken(f"the networks of {name} read values of the graph", gm)
            if not _fits(term):
                by = f"what the rule {term.rule} says of {term.op} at {' and '.join(term.sites)}"
                raise broken(f"the networks of {name} have its use's shape for each sample; {by} has not", gm)


def _uses(sites: Iterable[Site]) -> dict[str, Counter[str]]:
    """Parameter -> site -> how many of its operands are made of it, at the sites that the loss reaches."""
    found: dict[str, Counter[str]] = {}
    for site in sites:
        if any(cotangent is not None for cotangent in site.cotangents):
            for operand in site.operands:
                for name in operand.prefix.parameters:
                    found.setdefault(name, Counter())[site.name] += 1
    return found


def _fits(term: Term) -> bool:
    """Whether the axes of the result are those of the use, some of them perhaps as one: in that order, as far as sizes
    tell.
    """
    network = term.network
    ours = [int(network.sizes[axis]) for axis in network.out if axis != BATCH]
    return BATCH in network.out and same_axes(ours, [int(size) for size in term.shape])


def same_axes(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both are sizes of the same axes in order, where an axis of one may stand for several of the other.

    (6, 4) and (2, 3, 4) are; (6, 4) and (4, 6) are not: up to each end of an axis that both have, one has one axis.
    """
    if 0 in (*one, *other):
        return 0 in one and 0 in other
    ends = [list(itertools.accumulate((s for s in sizes if s != 1), operator.mul)) for sizes in (one, other)]
    if ends[0][-1:] != ends[1][-1:]:
        return False
    common = sorted({*ends[0]} & {*ends[1]})
    between = [
        [sum(low < end <= high for end in each) for each in ends] for low, high in itertools.pairwise([0, *common])
    ]
    return all(min(counts) <= 1 for counts in between)


@promise(Stage.MERGED, Stage.PLANNED)
def merged(gm: GraphModule) -> None:
    """No two terms of a parameter could be one."""
    for name, gradient in GRADIENTS.of(gm).items():
        if len(merge_terms(gradient.terms)) != len(gradient.terms):
            raise broken(f"no two terms of {name} could be one", gm)


@promise(Stage.PLANNED)
def planned(gm: GraphModule) -> None:
    """Everything asked of every parameter has trees for all of it, whose leaves are there."""
    plan = PLAN.of(gm)
    if not _same_gradients([p.gradient for p in plan.parameters], list(GRADIENTS.of(gm).values())):
        raise broken("every gradient is planned", gm)
    known = set(read_by_networks(gm))
    for parameter in plan.parameters:
        name = parameter.gradient.name
        if parameter.gradient.terms and not _answers(parameter, plan):
            raise broken(f"everything asked of {name} has a tree", gm)
        for part in parameter.parts:
            network = part.contraction.network
            leaves = {node.leaf.key for node in part.tree.nodes.values() if isinstance(node, LeafExpr)}
            if leaves != {leaf.key for leaf in network.leaves} or set(part.tree.axes) != set(network.out):
                raise broken(f"the trees of {name} contract their networks", gm)
            for leaf in network.leaves:
                if not all(source in known or _is_made(source, part, parameter) for source in leaf.sources):
                    raise broken(f"the trees of {name} read what is there", gm)


def _same_gradients(planned: Sequence[ParameterGradient], found: Sequence[ParameterGradient]) -> bool:
    """Whether these are the gradients that were found, or those of groups that are made of them."""
    if len(planned) != len(found):
        return False
    for made, gradient in zip(planned, found, strict=True):
        uses = [[(term.sites, term.rule, term.prefix) for term in g.terms] for g in (made, gradient)]
        of_others = any(term.of_samples is not None for term in made.terms)
        if made != gradient and not (made.name == gradient.name and of_others and uses[0] == uses[1]):
            return False
    return True


def _answers(parameter: ParameterPlan, plan: Plan) -> bool:
    """Whether every use is in every answer: once where the ask is linear, with itself where it is quadratic."""
    uses = range(len(parameter.gradient.terms))
    for ask in {*plan.asks, *([Materialized()] if parameter.total else [])}:
        found = [part.contraction.terms for part in parameter.parts if part.ask == ask]
        of_samples = ask.samples and any(term.of_samples is not None for term in parameter.gradient.terms)
        if parameter.total and ask.phase is not Phase.GRADIENTS and not of_samples:
            good = bool(found) and not any(found)
        elif isinstance(ask, Linear):
            good = sorted(found) == [(use,) for use in uses]
        elif isinstance(ask, Quadratic):
            good = len(set(found)) == len(found) and set(found) >= {(use, use) for use in uses}
        else:
            good = bool(found)
        if not good:
            return False
    return True


def _is_made(source: Source, part: Part, parameter: ParameterPlan) -> bool:
    """Whether evaluating the plan makes the source, or it is given at the call."""
    if source.kind is Kind.GRADS:
        return parameter.total and source.name == parameter.gradient.name
    if source.kind is Kind.WEIGHTS:
        return source.name == part.ask.reads
    return source.kind in (Kind.GIVEN, Kind.PLACEHOLDER)


@promise(Stage.LOWERED, Stage.TIDIED)
def lowered(gm: GraphModule) -> None:
    """Only results remain as outputs: no site input and no cotangent."""
    for spec in facts.graph_facts(gm).outputs:
        if spec.kind in READ:
            raise broken("a lowered graph returns results only", gm)


@promise(Stage.TIDIED)
def tidied(gm: GraphModule) -> None:
    """No op is done twice, none for nothing; one node computes the batch size."""
    seen: dict[Any, Node] = {}
    batch, counts = facts.graph_facts(gm).batch, 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if not node.users and not node.is_impure():
            raise broken("every value is read", gm, node)
        key = computation(node)
        if key is not None and seen.setdefault(key, node) is not node:
            raise broken("no op is done twice", gm, node)
        value = node.meta.get("val")
        counts += isinstance(value, torch.SymInt) and facts.expr(value) == batch
        if counts > 1:
            raise broken("one node computes the batch size", gm, node)
