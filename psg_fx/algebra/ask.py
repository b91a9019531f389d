"""What an ask is: something contracted of every parameter's gradient, as networks.

A gradient is a sum of terms, a network for each use.  An ask that is linear in the gradient contracts each term by
itself; one that is quadratic contracts all pairs, so that a parameter used several times keeps its cross terms.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.network import Network
from psg_fx.algebra.overlap import overlap, why_not_direct


class Phase(enum.IntEnum):
    """When an ask is computed: it may read what earlier phases have found."""

    GRADIENTS = 0
    """The gradients themselves, which everything else may read from memory."""
    CONTRACTIONS = 1
    """Norms, products, sums: what reads nothing but the graph and the inputs of quantities."""
    WEIGHTED = 2
    """What reads weights of the samples that are given at the call."""
    AFTER_NORMS = 3
    """What reads weights that follow from the norms: all that it reads is kept until they are known."""


class ThroughTotal(Exception):
    """Why an ask needs the gradient itself, the sum of all its terms."""


@dataclass(frozen=True)
class Contraction:
    """A network that an ask needs.  terms: the use, or the two, that it is made of.  scale: its factor in the sum."""

    network: Network
    terms: tuple[int, ...]
    scale: float = 1.0


class Ask:
    """Something contracted of every parameter's gradient.

    like_parameter: the result has the parameter's shape (after the samples, if it keeps them), so that what was found
    for the operand of a site is pulled back to the parameter.  per_sample: the samples are its first dim.
    accumulated: kept in float32 or better.  nameless: its networks do not depend on the name of the parameter, so that
    like parameters share the code that computes it.  samples: it is asked of single samples, also where gradients are
    those of groups.  adds_up: that of a parameter is the sum of those of its slices; what is like the parameter is
    sliced as it is.
    """

    like_parameter: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    per_sample: ClassVar[bool] = True
    accumulated: ClassVar[bool] = True
    nameless: ClassVar[bool] = False
    samples: bool = False

    def __init_subclass__(cls) -> None:
        cls.nameless = cls.__dict__.get("nameless", False)  # not inherited: what a subclass adds may look at names

    @property
    def phase(self) -> Phase:
        """When it is computed."""
        return Phase.CONTRACTIONS

    @property
    def reads(self) -> str:
        """The name of the weights of the samples that it reads, "" for none."""
        return ""

    @property
    def key(self) -> str:
        """Its name among the results."""
        raise NotImplementedError

    def contractions(self, gradient: ParameterGradient) -> list[Contraction]:
        """What adds up to the ask.  Raises ThroughTotal."""
        raise NotImplementedError

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        """The shape of the result."""
        raise NotImplementedError

    def finish(self, value: torch.Tensor, parts: int) -> torch.Tensor:
        """The result, from the sum of its parts."""
        return value


class Linear(Ask):
    """⟨g, something⟩: each term by itself."""

    def contractions(self, gradient: ParameterGradient) -> list[Contraction]:
        return [Contraction(self.contract(term, gradient.name), (k,)) for k, term in enumerate(gradient.terms)]

    def contract(self, term: Term, name: str) -> Network:
        """One term's part."""
        raise NotImplementedError


class Quadratic(Ask):
    """⟨g, g⟩ = Σ_k ⟨g_k, g_k⟩ + 2 Σ_{k<l} ⟨g_k, g_l⟩, where terms that meet nowhere have no product."""

    def contractions(self, gradient: ParameterGradient) -> list[Contraction]:
        terms = gradient.terms
        if reason := why_not_direct(terms):
            raise ThroughTotal(reason)
        pairs = itertools.combinations_with_replacement(range(len(terms)), 2)
        return [
            Contraction(self.multiply(terms[k].network, terms[l].network), (k, l), 1.0 if k == l else 2.0)
            for k, l in pairs
            if overlap(terms[k], terms[l])
        ]  # fmt: skip

    def multiply(self, g: Network, h: Network) -> Network:
        """The product of two terms."""
        raise NotImplementedError

    def finish(self, value: torch.Tensor, parts: int) -> torch.Tensor:
        """A square; it may be rounded below zero where terms cancel, those of positions or of several parts."""
        return value.clamp(min=0)
