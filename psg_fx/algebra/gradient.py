"""The gradient of each parameter as a sum of networks, ready for the planner."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from psg_fx.algebra.network import Leaf, Network
from psg_fx.algebra.site import Prefix
from psg_fx.graph.facts import Entry


@dataclass(frozen=True)
class Term:
    """One use of a parameter (or several merged ones): a network for the operand, and the way back to the parameter.

    kinds: the position of the operand and the kind of its site, for each use.  of_samples: where the network is that of
    groups, the one of single samples.
    """

    network: Network
    sites: tuple[str, ...]
    op: str
    rule: str
    shape: tuple[sympy.Expr, ...]
    prefix: Prefix
    where: str = ""
    kinds: tuple[Hashable, ...] = ()
    of_samples: Network | None = None


@dataclass(frozen=True)
class ParameterGradient:
    """The per-sample gradient of one parameter: the sum of its terms.  No terms: the loss never reaches it; it is 0."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    terms: tuple[Term, ...]


GRADIENTS = Entry[Mapping[str, ParameterGradient]]("gradients")
"""Every tracked parameter by its name (set by networks)."""


def merge_terms(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Concatenate uses of one parameter by the same rule along the summed axis.

    Σ_k x_k ȳ_k = [x_1 ... x_K][ȳ_1 ... ȳ_K].  An unrolled recurrent layer becomes one term with as many positions as
    steps.
    """
    groups: dict[Any, list[Term]] = {}
    for index, term in enumerate(terms):
        groups.setdefault(_signature(term) or index, []).append(term)
    return tuple(_concatenated(group) if len(group) > 1 else group[0] for group in groups.values())


def _signature(term: Term) -> Any:
    """What must agree for two terms to be concatenated; None if this one cannot be."""
    g = term.network
    summed = {a for leaf in g.leaves for a in leaf.axes} - set(g.out)
    if len(summed) != 1 or g.scale != 1.0:
        return None
    (along,) = summed
    if any(along not in leaf.axes or leaf.form.name == "patches" for leaf in g.leaves):
        return None
    fixed = tuple((leaf.kinds, leaf.form, leaf.dtype, leaf.axes, _without(leaf, along)) for leaf in g.leaves)
    return (term.rule, term.prefix.operand, g.out, fixed)


def _without(leaf: Leaf, axis: str) -> tuple[sympy.Expr, ...]:
    return tuple(size for a, size in zip(leaf.axes, leaf.sizes, strict=True) if a != axis)


def _concatenated(group: list[Term]) -> Term:
    first = group[0].network
    (along,) = {a for leaf in first.leaves for a in leaf.axes} - set(first.out)
    leaves = tuple(_cat([term.network.leaves[k] for term in group], along) for k in range(len(first.leaves)))
    sites = tuple(site for term in group for site in term.sites)
    kinds = tuple(kind for term in group for kind in term.kinds)
    return replace(group[0], network=Network(leaves, first.out), sites=sites, kinds=kinds)


def _cat(leaves: list[Leaf], along: str) -> Leaf:
    first = leaves[0]
    dim = first.axes.index(along)
    builds, counts = [leaf.build for leaf in leaves], [len(leaf.sources) for leaf in leaves]

    def build(*tensors: torch.Tensor) -> torch.Tensor:
        rest = iter(tensors)
        return torch.cat([make(*(next(rest) for _ in range(n))) for make, n in zip(builds, counts, strict=True)], dim)

    total = sum((leaf.sizes[dim] for leaf in leaves), sympy.Integer(0))
    sizes = tuple(total if k == dim else size for k, size in enumerate(first.sizes))
    sources = tuple(source for leaf in leaves for source in leaf.sources)
    recipe = f"cat {dim} " + " | ".join(leaf.recipe for leaf in leaves)
    return replace(first, sources=sources, recipe=recipe, sizes=sizes, build=build)
