"""Per-sample gradients as tensor networks.

The gradient of sample b at one use of a parameter is a contraction of few operands: for a linear layer
`x[b,t,i] ȳ[b,t,o] -> [b,o,i]`.  A `Leaf` is an operand: a tensor of the joint graph, arranged so that it has exactly
the named axes.  A `Network` is a product of leaves and the axes that are kept; every other axis is summed.  Sizes are
sympy expressions in the batch symbol; nothing here holds a tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sympy
import torch

BATCH = "b"
ROWS = "r"
"""The rows of a group, with the positions in each: an axis whose size differs from call to call."""

Axes = tuple[str, ...]


class Kind(enum.Enum):
    """What a leaf may read, in the order in which operands stand in a contraction."""

    GIVEN = "given"
    WEIGHTS = "weights"
    GRADS = "grads"
    PLACEHOLDER = "placeholder"
    ACTIVATION = "activation"
    COTANGENT = "cotangent"
    OUTPUT = "output"


class Source(NamedTuple):
    """One tensor that a leaf reads: an input given at the call, the weights of samples, the materialised gradient of a
    parameter, or a value of the joint graph (a placeholder; what a site reads; ȳ; the output of a site).
    """

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.name}"


class Form:
    """How an operand is stored.  `Dense` has all its axes in memory; other forms are kept as long as that pays."""

    name = "dense"


@dataclass(frozen=True)
class Dense(Form):
    """A plain tensor with exactly the axes of the leaf."""


@dataclass(frozen=True)
class OneHot(Form):
    """`onehot(ids)[b, t, v]`: stored as the integer tensor `ids[b, t]`; `classes` is the size of v."""

    name = "onehot"
    classes: int = 0


@dataclass(frozen=True)
class Members(OneHot):
    """`onehot(ids)[r, b]`, which row belongs to which group: stored as `ids[r]`, -1 for a row of none.  `classes` is
    known when it is computed with, since the number of groups is another at every call.
    """

    name = "members"


@dataclass(frozen=True)
class Routed(Form):
    """`onehot(ids)[b, t, e] x[b, t, i]`: stored as the pair of x and ids; `classes` is the size of e, and `lead` counts
    the axes up to it.  members: `onehot(ids)[r, b] x[r, i]`, which row belongs to which group; then `classes` is known
    when it is computed with.
    """

    name = "routed"
    classes: int = 0
    lead: int = 0
    members: bool = False


@dataclass(frozen=True)
class Patches(Form):
    """`patches(x)[b, t, g, i]`: stored as `x[b, f, g·c, *space]`; t = (f, *out_space), i = (c, *kernel).

    `f` counts what is folded into the batch dim beside the samples (1 for an ordinary convolution).
    """

    name = "patches"
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    space: tuple[int, ...] = ()
    out_space: tuple[int, ...] = ()


@dataclass(frozen=True)
class Symmetric(Form):
    """A matrix `G[b, t, t']` that is symmetric: stored are its first `cut` columns and the block right below, flattened
    and side by side, `[b, entries]`.
    """

    name = "symmetric"
    cut: int = 0


@dataclass(frozen=True)
class Unformed(Form):
    """A Gram matrix `G[b, t, t']` that is not formed: stored are the rows whose inner products it holds, `[b, t, i]`,
    of `depth` elements and a dtype of their own.
    """

    name = "unformed"
    depth: int = 0
    rows: torch.dtype = torch.float32


@dataclass(frozen=True)
class TileSums(Form):
    """A value of which nothing is stored but the sums of squares of its tiles, `[b, tiles]`."""

    name = "tile sums"


@dataclass(frozen=True)
class WithTileSums(Form):
    """A plain tensor, and beside it the sums of squares of its tiles: a pair of tensors."""

    name = "with tile sums"


@dataclass(frozen=True)
class Leaf:
    """One operand.

    label: how it prints ("x", "ȳ", "onehot(ids)"); nothing else may depend on it.
    sources: what it is made of.
    recipe: names how `build` makes it of them; leaves are equal if their sources, recipe and form are.
    axes: one letter (or name) per dim of the built tensor, or of what an implicit form stands for.
    copied: building it moves all of it in memory.
    """

    label: str
    sources: tuple[Source, ...]
    recipe: str
    axes: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]
    form: Form = Dense()
    dtype: torch.dtype = torch.float32
    build: Callable[..., torch.Tensor] = field(compare=False, repr=False, default=lambda x: x)
    copied: bool = field(compare=False, repr=False, default=False)

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.sizes), (self.axes, self.sizes)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of its sources."""
        return tuple(source.kind for source in self.sources)

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of the tensor, whatever its axes are called."""
        return ("leaf", self.sources, self.recipe, self.form)

    def renamed(self, names: Mapping[str, str]) -> Leaf:
        """The same tensor under other axis names."""
        return replace(self, axes=tuple(names.get(a, a) for a in self.axes))


@dataclass(frozen=True)
class Network:
    """Σ over every axis that is not in `out` of the product of the leaves, times `scale`.

    order: of axes in memory, for what is computed on the way; networks of one gradient agree on it, so that they can
    share the gradient.  Default: that of `out`.
    """

    leaves: tuple[Leaf, ...]
    out: tuple[str, ...]
    scale: float = 1.0
    order: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, sympy.Expr]:
        """The size of every axis."""
        found: dict[str, sympy.Expr] = {}
        for leaf in self.leaves:
            for axis, size in zip(leaf.axes, leaf.sizes, strict=True):
                if found.setdefault(axis, size) != size:
                    raise AssertionError(f"axis {axis} has two sizes, {found[axis]} and {size}, in {self}")
        return found

    @property
    def equation(self) -> str:
        """`bti,bto->boi`"""
        return ",".join("".join(leaf.axes) for leaf in self.leaves) + "->" + "".join(self.out)

    def __str__(self) -> str:
        factors = " ".join(f"{leaf.label}[{','.join(leaf.axes)}]" for leaf in self.leaves)
        return f"{factors} -> [{','.join(self.out)}]"


def primed(g: Network) -> Network:
    """The same network with its summed axes renamed, ready to be multiplied with the first."""
    inner = {axis: axis + "'" for leaf in g.leaves for axis in leaf.axes if axis not in g.out}
    return Network(tuple(leaf.renamed(inner) for leaf in g.leaves), g.out, g.scale)


def has_primed(axes: Iterable[str]) -> bool:
    """Whether axes of the second of two gradients are among them: values of both meet."""
    return any(axis.endswith("'") for axis in axes)


def paired(axes: Axes) -> Axes:
    """The axes that are there twice, as they are and primed, as those of a Gram matrix are."""
    return tuple(axis for axis in axes if axis + "'" in axes)


def with_out_axes(g: Network, out: tuple[str, ...]) -> Network:
    """`g` with its out axes called `out`, and no summed axis that clashes with those."""
    names = dict(zip(g.out, out, strict=True))
    taken = set(out)
    for leaf in g.leaves:
        for axis in leaf.axes:
            if axis not in names:
                fresh = axis
                while fresh in taken:
                    fresh += "_"
                names[axis] = fresh
                taken.add(fresh)
    return Network(tuple(leaf.renamed(names) for leaf in g.leaves), out, g.scale)


def inner(g: Network, h: Network, keep: Iterable[str] = (BATCH,), batch: str = BATCH) -> Network:
    """⟨g, h⟩ over all out axes but `keep`.  The out axes of `h` are matched with those of `g` by position; its samples
    are called `batch`.
    """
    h = primed(with_out_axes(h, tuple(batch if a == BATCH else a for a in g.out)))
    order = tuple(dict.fromkeys(other for a in g.out for other in ((a, batch) if a == BATCH else (a,))))
    return Network(g.leaves + h.leaves, tuple(keep), g.scale * h.scale, order)


def weighted(g: Network, weights: Leaf | None) -> Network:
    """Σ_b w_b g_b: the samples are summed; `weights` is a leaf with the one axis b, or None for ones."""
    leaves = g.leaves if weights is None else (*g.leaves, weights)
    return Network(leaves, tuple(a for a in g.out if a != BATCH), g.scale, g.out)
