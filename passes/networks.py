"""networks: every parameter operand of every site gets its network from the rules; then uses are merged."""

from __future__ import annotations

import dataclasses

from torch.fx import GraphModule

from psg_fx.algebra.gradient import GRADIENTS, ParameterGradient, Term, merge_terms
from psg_fx.algebra.network import Network
from psg_fx.algebra.rule import networks_of
from psg_fx.algebra.site import SITES, Operand, Site
from psg_fx.graph import facts
from psg_fx.graph.stages import Stage

from .rules.fallback import fallback
from .runner import graph_pass


@graph_pass("networks", before=Stage.JOINT, after=Stage.NETWORKED)
def networks(gm: GraphModule) -> GraphModule:
    """After: `GRADIENTS` has every tracked parameter once, with a term for each use."""
    terms: dict[str, list[Term]] = {}
    for site in SITES.of(gm):
        if any(c is not None for c in site.cotangents):
            for name, term in site_terms(site):
                terms.setdefault(name, []).append(term)
    gradients: dict[str, ParameterGradient] = {}
    for node in facts.placeholders(gm):
        spec = facts.input_spec(node)
        if spec.tracked and spec.name not in gradients:
            value = node.meta["val"]
            shape = tuple(int(s) for s in value.shape)
            gradients[spec.name] = ParameterGradient(spec.name, shape, value.dtype, tuple(terms.get(spec.name, ())))
    GRADIENTS.put(gm, gradients)
    return gm


def site_terms(site: Site) -> list[tuple[str, Term]]:
    """A term for each parameter that each operand of the site is derived from."""
    found = []
    for operand in site.operands:
        network, rule = networks_of(site)[operand.position]
        if network is None:
            network = fallback(site, operand)
        found += [(name, _term(site, operand, network, rule)) for name in operand.prefix.parameters]
    return found


def _term(site: Site, operand: Operand, network: Network, rule: str) -> Term:
    kinds = ((operand.position, site.kind),)
    return Term(network, (site.name,), site.op, rule, operand.value.shape, operand.prefix, site.where, kinds)


@graph_pass("merge", before=Stage.NETWORKED, after=Stage.MERGED)
def merge(gm: GraphModule) -> GraphModule:
    """Concatenate the uses of one parameter by the same rule.  After: no two terms of a parameter could be one."""
    found = GRADIENTS.of(gm).items()
    GRADIENTS.put(gm, {name: dataclasses.replace(g, terms=merge_terms(g.terms)) for name, g in found})
    return gm
