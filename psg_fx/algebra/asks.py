"""The asks: gradients, norms, products, sums, directions and projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch

from psg_fx.algebra.ask import Linear, Phase, Quadratic, ThroughTotal
from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.network import BATCH, Axes, Dense, Kind, Leaf, Network, Source, inner, weighted
from psg_fx.algebra.prefix import push_forward, sources
from psg_fx.algebra.site import Prefix
from psg_fx.tensors import accumulation_dtype, product, reshape

OTHER = "b'"
"""The samples of the second gradient in a product of two."""


@dataclass(frozen=True)
class Materialized(Linear):
    """The gradients themselves: name -> [B, *shape]."""

    like_parameter: ClassVar[bool] = True
    accumulated: ClassVar[bool] = False
    nameless: ClassVar[bool] = True
    key: ClassVar[str] = "grads"

    @property
    def phase(self) -> Phase:
        return Phase.GRADIENTS

    def contract(self, term: Term, name: str) -> Network:
        return term.network

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        return (batch, *gradient.shape)

    def __str__(self) -> str:
        return "g[b]"


@dataclass(frozen=True)
class SquaredNorm(Quadratic):
    """‖g_b‖² of every parameter: name -> [B]."""

    adds_up: ClassVar[bool] = True
    nameless: ClassVar[bool] = True
    key: ClassVar[str] = "sq_norms"

    def multiply(self, g: Network, h: Network) -> Network:
        return inner(g, h)

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def __str__(self) -> str:
        return "‖g[b]‖²"


@dataclass(frozen=True)
class InnerProducts(Quadratic):
    """⟨g_b, g_b'⟩ of every parameter: name -> [B, B]."""

    adds_up: ClassVar[bool] = True
    nameless: ClassVar[bool] = True
    key: ClassVar[str] = "gram"

    def multiply(self, g: Network, h: Network) -> Network:
        return inner(g, h, (BATCH, OTHER), batch=OTHER)

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        return (batch, batch)

    def finish(self, value: torch.Tensor, parts: int) -> torch.Tensor:
        return (value + value.T) / 2 if parts > 1 else value  # ⟨g_k, h_l⟩ stands for ⟨g_l, h_k⟩ too

    def __str__(self) -> str:
        return "⟨g[b], g[b']⟩"


@dataclass(frozen=True)
class Squares(Quadratic):
    """Σ_b g_b² elementwise: name -> shape."""

    like_parameter: ClassVar[bool] = True
    per_sample: ClassVar[bool] = False
    nameless: ClassVar[bool] = True
    key: ClassVar[str] = "squares"

    def multiply(self, g: Network, h: Network) -> Network:
        return inner(g, h, tuple(a for a in g.out if a != BATCH))

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        return gradient.shape

    def __str__(self) -> str:
        return "Σ_b g[b]²"


@dataclass(frozen=True)
class Weighted(Linear):
    """Σ_b w_b g_b of every parameter: name -> shape.

    weights: the name of the [B] weights, "" for ones.  after_norms: they follow from the norms.  samples: b is every
    sample, also where the gradients are those of groups of samples.
    """

    weights: str = ""
    after_norms: bool = False
    samples: bool = False
    like_parameter: ClassVar[bool] = True
    per_sample: ClassVar[bool] = False
    accumulated: ClassVar[bool] = False
    nameless: ClassVar[bool] = True

    @property
    def phase(self) -> Phase:
        if not self.weights:
            return Phase.CONTRACTIONS
        return Phase.AFTER_NORMS if self.after_norms else Phase.WEIGHTED

    @property
    def reads(self) -> str:
        return self.weights

    @property
    def key(self) -> str:
        return f"weighted:{self.weights}" if not self.samples else "samples"

    def contract(self, term: Term, name: str) -> Network:
        g = term.of_samples if self.samples and term.of_samples is not None else term.network
        if not self.weights:
            return weighted(g, None)
        source = (Source(Kind.WEIGHTS, self.weights),)
        return weighted(g, Leaf("c", source, "weights", (BATCH,), (g.sizes[BATCH],), dtype=g.leaves[0].dtype))

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        return gradient.shape

    def __str__(self) -> str:
        return "Σ_b c[b] g[b]" if self.weights else "Σ_b g[b]"


@dataclass(frozen=True)
class InFull(Weighted):
    """The same, with all that is multiplied in float32 or better: the sum is rounded to that."""

    accumulated: ClassVar[bool] = True

    def contract(self, term: Term, name: str) -> Network:
        found = super().contract(term, name)
        return replace(found, leaves=tuple(map(_accumulated, found.leaves)))


@dataclass(frozen=True)
class Total(InFull):
    """Σ_b g_b of every parameter: name -> shape, kept in float32 or better."""

    @property
    def key(self) -> str:
        return "total"


def _accumulated(leaf: Leaf) -> Leaf:
    """A plain leaf in the dtype that its sums are kept in."""
    dtype = accumulation_dtype(leaf.dtype)
    if dtype is leaf.dtype or not isinstance(leaf.form, Dense):
        return leaf
    recipe = f"{leaf.recipe} in {dtype}"
    return replace(leaf, recipe=recipe, dtype=dtype, build=lambda *values: leaf.build(*values).to(dtype), copied=True)


def along_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a direction for a parameter of this dtype is read in."""
    return torch.float32 if dtype is torch.float16 else dtype


@dataclass(frozen=True)
class Along(Linear):
    """⟨g_b, v⟩ with a direction v for every parameter: name -> [B], or [B, K] with `count` = K directions.

    ⟨Jᵀ ȳ, v⟩ = ⟨ȳ, J v⟩: the direction goes forward to the operand of each site, the gradients stay there.
    """

    count: int | None = None
    adds_up: ClassVar[bool] = True
    nameless: ClassVar[bool] = True
    key: ClassVar[str] = "dots"

    def contract(self, term: Term, name: str) -> Network:
        if term.prefix.across:
            raise ThroughTotal("a process has a part of its gradient at its use: the parts are summed first")
        g, several = term.network, self.count is not None
        lead: Axes = ("K",) if several else ()
        axes = (*lead, *(a for a in g.out if a != BATCH))
        known = {**g.sizes, "K": sympy.Integer(self.count or 1)}
        sizes = tuple(known[a] for a in axes)
        if term.prefix.trivial:
            given, recipe, push = [direction(name)], "direction", None
        else:
            given, recipe = [direction(name), *sources(term.prefix)], f"direction of {term.prefix.operand}"
            push = push_forward(term, name, several)
        recipe, build = _shaped(recipe, sizes, push)
        leaf = Leaf("v", tuple(given), recipe, axes, sizes, dtype=along_dtype(g.leaves[0].dtype), build=build)
        return Network((*g.leaves, leaf), (BATCH, *lead), g.scale, g.out)

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        return (batch,) if self.count is None else (batch, self.count)

    def __str__(self) -> str:
        return "⟨g[b], v⟩" if self.count is None else "⟨g[b], v[k]⟩"


def direction(name: str) -> Source:
    """The source that holds the direction of a parameter."""
    return Source(Kind.GIVEN, f"direction.{name}")


def _shaped(
    recipe: str, sizes: tuple[sympy.Expr, ...], push: Callable[..., torch.Tensor] | None = None
) -> tuple[str, Callable[..., Any]]:
    """A recipe of a leaf in these sizes, which it says: two ops may see one parameter in two shapes."""
    shape = [int(s) for s in sizes]
    return f"{recipe} as {shape}", lambda v, *inputs: reshape(push(v, *inputs) if push else v, shape)


@dataclass(frozen=True)
class Projected(Linear):
    """Pᵀ g_b Q of every matrix, Rᵀ g_b of every vector: name -> [B, numbers of columns].

    A side of at most `rank` elements is kept as it is.
    """

    rank: int
    nameless: ClassVar[bool] = True
    key: ClassVar[str] = "projection"

    def contract(self, term: Term, name: str) -> Network:
        if not term.prefix.trivial:
            raise ThroughTotal("a projection reads the whole matrix: gradients are pulled back first")
        g, out, leaves = term.network, [BATCH], list(term.network.leaves)
        shape = tuple(int(s) for s in term.shape)
        for side, axes, new in zip(sides(shape), _split(g, shape), ("P", "Q"), strict=False):
            columns = self.columns(side)
            if columns is None:
                out += axes
                continue
            sizes = (*(g.sizes[a] for a in axes), sympy.Integer(columns))
            recipe, build = _shaped("projection", sizes)
            given = (projection(name, new),)
            dtype = along_dtype(g.leaves[0].dtype)
            leaves.append(Leaf(new, given, recipe, (*axes, new), sizes, dtype=dtype, build=build))
            out.append(new)
        return Network(tuple(leaves), tuple(out), g.scale, g.out)

    def columns(self, side: int) -> int | None:
        """To how many numbers a side is projected; None: it is kept."""
        return self.rank if side > self.rank else None

    def shape(self, gradient: ParameterGradient, batch: Any) -> tuple[Any, ...]:
        return (batch, product(min(side, self.rank) for side in sides(gradient.shape)))

    def __str__(self) -> str:
        return "Pᵀ g[b] Q"


def projection(name: str, side: str) -> Source:
    """The source that holds the random matrix for one side of a parameter."""
    return Source(Kind.GIVEN, f"projection.{name}.{side}")


def sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows and columns of a parameter as a matrix (the first dim against all others), or the length of a vector."""
    return (shape[0], product(shape[1:])) if len(shape) > 1 else (product(shape),)


def _split(g: Network, shape: tuple[int, ...]) -> list[list[str]]:
    """The axes of the gradient on each side of the matrix."""
    axes = [a for a in g.out if a != BATCH]
    if len(shape) < 2:
        return [axes]
    for k in range(len(axes) + 1):
        if product(int(g.sizes[a]) for a in axes[:k]) == shape[0]:
            return [axes[:k], axes[k:]]
    raise ThroughTotal("its use sees the matrix in another shape: gradients are summed first")


def whole(gradient: ParameterGradient, batch: sympy.Symbol) -> ParameterGradient:
    """The gradient as one term that is read from memory: what other asks contract once it is materialised."""
    shape = tuple(sympy.Integer(side) for side in sides(gradient.shape))
    axes = (BATCH, *("pq"[: len(shape)]))
    leaf = Leaf("g", (Source(Kind.GRADS, gradient.name),), "total", axes, (batch, *shape), dtype=gradient.dtype,
                build=lambda g: reshape(g, (g.shape[0], *(int(s) for s in shape))))  # fmt: skip
    prefix = Prefix(gradient.name, (), (gradient.name,), {}, trivial=True, selects=True)
    term = Term(Network((leaf,), axes), (), "total", "total", tuple(map(sympy.Integer, gradient.shape)), prefix)
    return ParameterGradient(gradient.name, gradient.shape, gradient.dtype, (term,))


FLOORS = "sq_norm_floors"
"""Beside the squared norms, for parameters whose norm is found without their gradient: what rounding errors of the
squared norm do not exceed, [B] (`psg_fx/planner/rounding.py`)."""
