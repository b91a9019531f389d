"""The words that rules are written in: values as leaves of networks, their dims arranged and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch

from psg_fx.algebra.network import BATCH, Dense, Leaf, Network, OneHot
from psg_fx.algebra.site import Value
from psg_fx.graph.facts import SampleAxis
from psg_fx.tensors import permute, product, reshape


def network(spec: str, *values: Value | Leaf) -> Network | None:
    """A network from an equation such as `"b t* i, b t* o -> b o i"`.

    Each operand's term names the dims of the value in order, `b` standing for the samples wherever they lie, and `t*`
    for all dims that no other name takes (also what is folded into the sample dim).  None if a value does not fit.
    """
    left, right = spec.split("->")
    terms = [term.split() for term in left.split(",")]
    leaves = []
    for term, value in zip(terms, values, strict=True):
        leaf = value if isinstance(value, Leaf) else arranged(value, tuple(term))
        if leaf is None:
            return None
        leaves.append(leaf)
    return Network(tuple(leaves), tuple(right.split()))


def arranged(value: Value, term: tuple[str, ...]) -> Leaf | None:
    """The value as a leaf with axes `term` (see `network`), samples first."""
    plan = Arrangement.of(value, term)
    return None if plan is None else plan.leaf(value)


def onehot(
    ids: Value, plan: Arrangement, classes: sympy.Expr, dtype: torch.dtype, axis: str = "v", recipe: str = "arrange",
    places: Callable[[torch.Tensor], torch.Tensor] = lambda index: index,
) -> Leaf:  # fmt: skip
    """onehot(places(ids))[b,t,v], ids arranged by `plan`.  recipe: names what `places` does."""
    return Leaf(
        "onehot(ids)", (ids.source,), f"{recipe} {plan}", (BATCH, "t", axis), (*plan.sizes, sympy.sympify(classes)),
        OneHot(int(classes)), dtype, lambda index: plan(places(index)),
    )  # fmt: skip


@dataclass(frozen=True)
class Arrangement:
    """Unfold the sample dim, bring the samples to the front, flatten what the star takes: a plain torch function."""

    unfold: SampleAxis | None
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]

    @classmethod
    def of(cls, value: Value, term: tuple[str, ...]) -> Arrangement | None:
        """Match the dims of `value` with the names of `term`; None if they do not fit."""
        dims = unfolded_dims(value)
        names = [name for name in term if name != BATCH]
        star = next((name for name in names if name.endswith("*")), None)
        before = names.index(star) if star else len(names)
        after = len(names) - before - 1 if star else 0
        plain = [i for i, (_, role) in enumerate(dims) if role == "own"]
        folds = [i for i, (size, role) in enumerate(dims) if role == "fold" and size != 1]
        if len(plain) < before + after or (star is None and (len(plain) != before or folds)):
            return None
        if (BATCH in term) != any(role == "samples" for _, role in dims):
            return None
        taken = {i: names[k] for k, i in enumerate(plain[:before])}
        if after:
            taken |= {i: names[before + 1 + k] for k, i in enumerate(plain[len(plain) - after :])}
        rest = tuple(i for i in range(len(dims)) if i not in taken and dims[i][1] != "samples" and i not in _ones(dims))
        groups, axes = [], []
        for name in ([BATCH] if BATCH in term else []) + names:
            if name == BATCH:
                groups.append(tuple(i for i, (_, role) in enumerate(dims) if role == "samples"))
            elif name == star:
                groups.append(rest)
            else:
                groups.append(tuple(i for i, own in taken.items() if own == name))
            axes.append(name.rstrip("*"))
        sizes = tuple(product(dims[i][0] for i in group) * sympy.Integer(1) for group in groups)
        return cls(value.samples, tuple(groups), tuple(axes), sizes)

    @classmethod
    def grouped(cls, value: Value, groups: Mapping[str, tuple[int, ...]]) -> Arrangement:
        """An axis for each name of `groups`, made of those dims of `value`; "t" also takes what the samples are folded
        with.  The samples' dim is in the group "b".
        """
        dims, own = unfolded_dims(value), {}
        place = iter(range(len(dims)))
        folds: list[int] = []
        for dim in range(value.ndim):
            axis = value.samples
            if axis is not None and dim == axis.dim and axis.outer * axis.inner != 1:
                outer, own[dim], inner = next(place), next(place), next(place)
                folds = [i for i in (outer, inner) if dims[i][0] != 1]
            else:
                own[dim] = next(place)
        made = {name: tuple(own[dim] for dim in group) for name, group in groups.items()}
        made["t"] = (*folds, *made.get("t", ()))
        sizes = tuple(product(dims[i][0] for i in group) * sympy.Integer(1) for group in made.values())
        return cls(value.samples, tuple(made.values()), tuple(made), sizes)

    @classmethod
    def keeping(cls, value: Value, kept: tuple[int, ...]) -> Arrangement:
        """Axes (b, t, d0, d1, ...): a d for every dim in `kept`, t for all others and what samples are folded with."""
        assert value.samples is not None
        dim = value.samples.dim
        rest = tuple(d for d in range(value.ndim) if d != dim and d not in kept)
        return cls.grouped(value, {BATCH: (dim,), "t": rest, **{f"d{k}": (d,) for k, d in enumerate(kept)}})

    def leaf(self, value: Value) -> Leaf:
        """The value, arranged so."""
        return Leaf(value.symbol, (value.source,), f"arrange {self}", self.axes, self.sizes, Dense(), value.dtype, self)

    def __str__(self) -> str:
        return f"{self.unfold} {self.groups} {self.axes}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = unfold_samples(x, self.unfold)
        order = [i for group in self.groups for i in group]
        lost = [i for i in range(x.ndim) if i not in order]
        shape = [product(x.shape[i] for i in group) for group in self.groups]
        return reshape(permute(x, order + lost), shape)


def _ones(dims: list[tuple[sympy.Expr, str]]) -> set[int]:
    return {i for i, (size, role) in enumerate(dims) if role == "fold" and size == 1}


def unfolded_dims(value: Value) -> list[tuple[sympy.Expr, str]]:
    """Sizes of the dims of `unfold_samples(value)`, each "own", "samples" or "fold"."""
    found: list[tuple[sympy.Expr, str]] = []
    for dim, size in enumerate(value.shape):
        axis = value.samples
        if axis is not None and dim == axis.dim:
            samples = size / (axis.outer * axis.inner)
            folds = [(sympy.Integer(n), "fold") for n in (axis.outer, axis.inner)]
            found += (
                [(samples, "samples")] if axis.outer * axis.inner == 1 else [folds[0], (samples, "samples"), folds[1]]
            )
        else:
            found.append((size, "own"))
    return found


def unfold_samples(x: torch.Tensor, axis: SampleAxis | None) -> torch.Tensor:
    """Split the sample dim into (outer, B, inner), unless the samples fill it alone."""
    if axis is None or axis.outer * axis.inner == 1:
        return x
    samples = x.shape[axis.dim] // (axis.outer * axis.inner)
    return reshape(x, (*x.shape[: axis.dim], axis.outer, samples, axis.inner, *x.shape[axis.dim + 1 :]))


def samples_first(x: torch.Tensor, axis: SampleAxis) -> torch.Tensor:
    """`[B, *shape at B=1]`: each row is what a batch of one sample would hold."""
    x = unfold_samples(x, axis)
    if axis.outer * axis.inner == 1:
        rest = [i for i in range(x.ndim) if i != axis.dim]
        return permute(x, [axis.dim, *rest]).unsqueeze(axis.dim + 1)
    x = x.movedim(axis.dim + 1, 0)
    shape = x.shape
    return reshape(x, (*shape[: axis.dim + 1], shape[axis.dim + 1] * shape[axis.dim + 2], *shape[axis.dim + 3 :]))
