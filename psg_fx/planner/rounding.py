"""How far rounding can take a squared norm that does not come from the gradient itself.

g = Σ_t x_t ȳ_tᵀ has ‖g‖² = Σ_{t,t'} ⟨x_t, x_t'⟩ ⟨ȳ_t, ȳ_t'⟩, a sum of terms as large as S² with S = Σ_t ‖x_t‖ ‖ȳ_t‖.
Rounded, it is off by up to about ε S² however small g is: where positions cancel, what is found may be 0 for a gradient
of √ε S.  Clipping must not take such a gradient for small.  So it takes no squared norm for smaller than the floor

    κ ε S²,

which no rounding error exceeds: a norm so found is at least 1/√2 of the true one, whatever the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from psg_fx.algebra.asks import SquaredNorm
from psg_fx.algebra.gradient import ParameterGradient, Term
from psg_fx.algebra.network import BATCH, ROWS, Axes, Leaf, Members, Network, OneHot, Symmetric, Unformed, paired
from psg_fx.ops.products.gram_products import gram_diagonals
from psg_fx.planner.expr import ContractExpr, DenseExpr, Expr, LeafExpr, dense
from psg_fx.planner.methods.base import expand_to
from psg_fx.planner.plan import ParameterPlan
from psg_fx.tensors import HALF, accumulation_dtype

_KAPPA = 8.0
"""Rounding errors of the two Gram matrices and of their product, in units of ε S².  Measured on CPU, 2 to 512 positions
of 16 to 4096 elements: up to 5.7 where one position outweighs the others, 2.5 where positions cancel.
"""

_CUT_OFF = 1 / 32
"""The same for each element of a row in half precision: a CUDA device's matrix units add up 16 products at a time, and
cut off what float32 does not hold of the sum so far.  On an H100 rows of 768 and 3072 elements were 84 units off, of
the 120 that this allows.
"""

Evaluate = Callable[[Expr], torch.Tensor]
Labelled = tuple[Axes, torch.Tensor]
"""A tensor and the names of its axes."""


def floor(plan: ParameterPlan, evaluate: Evaluate) -> torch.Tensor | None:
    """κ ε S² of one parameter, [B]; None where its norms are those of gradients in memory, or of a single position.

    evaluate: the tensor of a node of a tree.
    """
    parts = [part for part in plan.parts if part.ask == SquaredNorm()]
    if not parts or plan.total or (len(parts) == 1 and (_is_square(parts[0].tree) or _is_outer(plan.gradient))):
        return None
    kappa = _KAPPA
    if len(parts) == 1 and (grams := _grams(parts[0].tree)):
        (term,) = plan.gradient.terms
        kappa += _CUT_OFF * sum(gram.pair.count(gram.pair.summed) for gram in grams if gram.a.dtype in HALF)
        reach = _of_grams(grams, [evaluate(gram) for gram in grams], term.network)
    else:
        reach = reduce(torch.add, (_of_term(term, evaluate) for term in plan.gradient.terms))
    return kappa * torch.finfo(reach.dtype).eps * reach.square()


def _of_term(term: Term, evaluate: Evaluate) -> torch.Tensor:
    """S of one use, from its operands.  Rows of `onehot` have norm 1."""
    leaves = [leaf for leaf in term.network.leaves if not isinstance(leaf.form, OneHot)]
    members = next((leaf for leaf in term.network.leaves if isinstance(leaf.form, Members)), None)
    own = None
    if members is not None:
        own = evaluate(dense(LeafExpr(members.axes, {}, members.dtype, members)))
    return _reach([_energy(leaf, term.network, evaluate) for leaf in leaves], term.network, own)


def _energy(leaf: Leaf, network: Network, evaluate: Evaluate) -> Labelled:
    """E[b, .., t], the squares summed over the axes of the gradient that no other operand has."""
    shared = {x for other in network.leaves if other is not leaf for x in other.axes} | {BATCH}
    own = [k for k, x in enumerate(leaf.axes) if x in network.out and x not in shared]
    tensor = evaluate(dense(LeafExpr(leaf.axes, {}, leaf.dtype, leaf)))
    squares = tensor.to(accumulation_dtype(tensor.dtype)).square()
    return tuple(x for k, x in enumerate(leaf.axes) if k not in own), squares.sum(own) if own else squares


def _of_grams(grams: Sequence[ContractExpr], tensors: Sequence[torch.Tensor], network: Network) -> torch.Tensor:
    """S from both Gram matrices, or from their rows: the same kernel gives it beside the norm.  Rows of `onehot` have
    norm 1.
    """
    if all(isinstance(gram.arg.form, Unformed) for gram in grams):
        return gram_diagonals(*tensors) * abs(network.scale)
    pairs = [pair for pair in zip(grams, tensors, strict=True) if not _is_onehot(pair[0].a)]
    return _reach([_diagonal(gram, tensor) for gram, tensor in pairs], network)


def _is_square(tree: Expr) -> bool:
    """Whether it is the sum of the squares of a gradient: no terms cancel."""
    return isinstance(tree, ContractExpr) and tree.pair.same


def _is_outer(gradient: ParameterGradient) -> bool:
    """Whether there is one position, so that nothing cancels."""
    (term,) = gradient.terms
    return all(size == 1 for x, size in term.network.sizes.items() if x not in term.network.out)


def _grams(tree: Expr) -> tuple[ContractExpr, ContractExpr] | None:
    """The Gram matrices `[.., t, t']` of the two operands, where the norm comes of them."""
    if not isinstance(tree, ContractExpr):
        return None
    a, b = tree.a, tree.b
    if isinstance(a, ContractExpr) and isinstance(b, ContractExpr) and _is_gram(a) and _is_gram(b):
        return a, b
    return None


def _is_gram(expr: ContractExpr) -> bool:
    """Whether every element of the diagonal is a sum of squares of one operand."""
    leaves = all(isinstance(child, (LeafExpr, DenseExpr)) for child in expr.children)
    return leaves and expr.pair.self_product and not expr.pair.same and bool(paired(expr.axes))


def _is_onehot(expr: Expr) -> bool:
    return isinstance(expr, LeafExpr) and isinstance(expr.leaf.form, OneHot)


def _by_group(rows: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """`[S, ..]` summed by groups, `[B, ..]`; what is no number stays in its own."""
    own = (members > 0).reshape(*members.shape, *[1] * (rows.ndim - 1))
    return torch.where(own, rows.unsqueeze(1), 0.0).sum(0)


def _diagonal(gram: ContractExpr, tensor: torch.Tensor) -> Labelled:
    """E[b, .., t] = G[b, .., t, t], the squares of the norms of rows."""
    form, axes, twice = gram.arg.form, gram.axes, paired(gram.axes)
    if isinstance(form, Symmetric):
        return (BATCH, *twice), _of_halves(tensor, int(gram.sizes[twice[0]]), form.cut)
    for axis in twice:
        tensor = tensor.diagonal(0, axes.index(axis), axes.index(f"{axis}'"))
        axes = (*(x for x in axes if x not in (axis, f"{axis}'")), axis)
    return axes, tensor.to(accumulation_dtype(tensor.dtype))


def _of_halves(tensor: torch.Tensor, size: int, cut: int) -> torch.Tensor:
    """The diagonal of a matrix that is stored as its first `cut` columns and the block right below, `[B, size]`."""
    t = torch.arange(size, device=tensor.device)
    return tensor.index_select(1, torch.where(t < cut, t * (cut + 1), size * cut + (t - cut) * (size - cut + 1)))


def _reach(energies: Sequence[Labelled], network: Network, members: torch.Tensor | None = None) -> torch.Tensor:
    """S [B] from the squared norms of the rows of all operands: the roots of their products summed over positions; then
    the 2-norm over axes of the gradient that operands share (groups).  members: which row is of which group of samples.
    """
    axes = tuple(dict.fromkeys(x for names, _ in energies for x in names))
    found = reduce(torch.mul, [expand_to(energy, names, axes) for names, energy in energies]).sqrt()
    if members is not None:
        found, axes = _by_group(found.movedim(axes.index(ROWS), 0), members), (BATCH, *(x for x in axes if x != ROWS))
    summed = [k for k, x in enumerate(axes) if x not in network.out]
    found = found.sum(summed) if summed else found
    shared = [k for k, x in enumerate(x for x in axes if x in network.out) if x != BATCH]
    found = found.square().sum(shared).sqrt() if shared else found
    return found * abs(network.scale) if abs(network.scale) != 1.0 else found
