"""Contractions of data with a parameter: linear, mm, bmm, addmm, baddbmm, matmul, mv, einsum.

All are y = einsum(X, W), and the gradient of W is the einsum of X and ȳ over what W does not index.
"""

from __future__ import annotations

import torch

from psg_fx.algebra.arrange import Arrangement, network, onehot
from psg_fx.algebra.network import BATCH, Leaf, Network
from psg_fx.algebra.rule import rule
from psg_fx.algebra.site import Site, Value
from psg_fx.ops import experts

from .pointwise import summed

aten = torch.ops.aten


@rule(aten.linear.default, params={"weight": 1, "bias": 2})
def linear(site: Site) -> dict[str, Network | None]:
    """y[b,t,o] = Σ_i x[b,t,i] W[o,i] + bias[o]; t stands for any middle axes.  A vector for W leaves no o.

    weight: x[b,t,i] ȳ[b,t,o] -> [b,o,i]        (Goodfellow 2015, arXiv:1510.01799)
    bias:   ȳ[b,t,o] -> [b,o]; one of another shape broadcasts from the right
    """
    x, weight, ybar = site.input(0), site.input(1), site.cotangent
    equation = "b t* i, b t* o -> b o i" if weight.ndim == 2 else "b t* i, b t* -> b i"
    return {"weight": network(equation, x, ybar), "bias": _bias(site)}


def _bias(site: Site) -> Network | None:
    """The gradient of a bias, if there is one: ȳ[b,t,o] -> [b,o], or summed over whatever it broadcasts along."""
    ybar, given = site.cotangent, site.arg(2, "bias", None)
    if not isinstance(given, Value) or given.shape == ybar.shape[-1:]:
        return network("b t* o -> b o", ybar)
    return summed(site, given.shape)


@rule(
    aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default, params={"a": 0, "b": 1}
)
def matmul(site: Site) -> dict[str, Network | None]:
    """Y = a @ b with broadcast batch dims; either side may be the parameter.

    b[g,i,o]: a[b,g,t,i] ȳ[b,g,t,o] -> [b,g,i,o];  a[g,o,i]: b[b,g,i,t] ȳ[b,g,o,t] -> [b,g,o,i]
    """
    a, b = site.input(0), site.input(1)
    equation = matmul_letters(a.ndim, b.ndim)
    return _both_sides(site, equation, a, b)


@rule(aten.addmm.default, aten.baddbmm.default, params={"bias": 0, "a": 1, "b": 2})
def addmm(site: Site) -> dict[str, Network | None]:
    """Y = β·bias + α·a @ b.  The bias broadcasts from the right; its gradient is β Σ ȳ over the rest."""
    a, b = site.input(1), site.input(2)
    alpha, beta = site.kwargs.get("alpha", 1), site.kwargs.get("beta", 1)
    found = _both_sides(site, matmul_letters(a.ndim, b.ndim), a, b)
    scaled = {name: _scaled(found_network, alpha) for name, found_network in found.items()}
    return {**scaled, "bias": _scaled(summed(site, site.input(0).shape), beta)}


@rule(experts.expert_mm, params={"weight": 1})
def expert_mm(site: Site) -> dict[str, Network | None]:
    """y[b,t,o] = Σ_i x[b,t,i] W[ids[b,t],i,o], the rows of a sample in t.

    weight: onehot(ids)[b,t,e] x[b,t,i] ȳ[b,t,o] -> [b,e,i,o]
    """
    x, weight, ids, ybar = site.input(0), site.input(1), site.input(2), site.cotangent
    plan = Arrangement.of(ids, (BATCH, "t*"))
    if plan is None or x.samples is None:
        return {}
    hot = onehot(ids, plan, weight.shape[0], ybar.dtype, "e")
    return {"weight": network("b t e, b t* i, b t* o -> b e i o", hot, x, ybar)}


@rule(aten.bilinear.default, params={"weight": 2, "bias": 3})
def bilinear(site: Site) -> dict[str, Network | None]:
    """y[b,t,o] = Σ_ij x[b,t,i] W[o,i,j] z[b,t,j] + bias[o]

    weight: x[b,t,i] z[b,t,j] ȳ[b,t,o] -> [b,o,i,j];  bias: ȳ[b,t,o] -> [b,o]
    """
    x, z, ybar = site.input(0), site.input(1), site.cotangent
    bias = network("b t* o -> b o", ybar)
    if x.samples is None or z.samples is None:
        return {"bias": bias}
    return {"weight": network("b t* i, b t* j, b t* o -> b o i j", x, z, ybar), "bias": bias}


@rule(aten.einsum.default, params={"a": "1.0", "b": "1.1"})
def einsum(site: Site) -> dict[str, Network | None]:
    """Y = einsum("..., ... -> ...", a, b): the gradient of either side is the einsum of the other with ȳ."""
    equation, operands = site.args[0].replace(" ", ""), site.args[1]
    if len(operands) != 2 or "..." in equation or "->" not in equation:
        return {}
    left, out = equation.split("->")
    a, b = left.split(",")
    if any(len(set(letters)) != len(letters) for letters in (a, b, out)):
        return {}
    return _both_sides(site, (a, b, out), operands[0], operands[1])


def matmul_letters(a_dims: int, b_dims: int) -> tuple[str, str, str]:
    """The einsum letters of torch.matmul for the given numbers of dims: ("abti", "abio", "abto")."""
    batch = "abcdefgh"[: max(a_dims, b_dims, 2) - 2]
    a_batch, b_batch = batch[len(batch) - max(a_dims - 2, 0) :], batch[len(batch) - max(b_dims - 2, 0) :]
    row, column = ("t" if a_dims > 1 else ""), ("o" if b_dims > 1 else "")
    return a_batch + row + "i", b_batch + "i" + column, batch + row + column


def _both_sides(site: Site, equation: tuple[str, str, str], a: Value, b: Value) -> dict[str, Network | None]:
    left, right, out = equation
    return {
        "a": _side(site, b, right, left, out, a),
        "b": _side(site, a, left, right, out, b),
    }


def _side(site: Site, x: Value, x_letters: str, w_letters: str, y_letters: str, w: Value) -> Network | None:
    """x[..] ȳ[..] -> [b, W's letters]; what W does not index is summed."""
    ybar = site.cotangent
    if x.samples is None or ybar.samples is None or w.samples is not None:
        return None
    sample = x_letters[x.samples.dim]
    if sample in w_letters or y_letters.index(sample) != ybar.samples.dim or x.samples.inner != ybar.samples.inner:
        return None
    sizes = {**dict(zip(x_letters, x.shape, strict=True)), **dict(zip(y_letters, ybar.shape, strict=True))}
    if any(sizes.get(letter, size) != size for letter, size in zip(w_letters, w.shape, strict=True)):
        return None  # the parameter broadcasts along a batch dim
    if any(letter not in x_letters and letter not in y_letters for letter in w_letters):
        return None
    if any(sizes[letter] != size for letter, size in zip(x_letters, x.shape, strict=True)):
        return None  # the data broadcast along a batch dim
    together = tuple(c for c in x_letters if c in y_letters and c not in w_letters and c != sample)
    groups = {BATCH: (sample,), "t": together} | {f"{c}_": (c,) for c in w_letters}
    alone = tuple(c for c in x_letters if c not in y_letters and c not in w_letters)
    left = lettered(x, x_letters, groups | ({"u": alone} if alone else {}))
    right = lettered(ybar, y_letters, groups)
    return Network((left, right), (BATCH, *(f"{c}_" for c in w_letters)))


def lettered(value: Value, letters: str, groups: dict[str, tuple[str, ...]]) -> Leaf:
    """The value, its dims called by letters, with an axis for each group of letters that it has; what is folded with
    the samples goes to t.
    """
    own = {name: tuple(letters.index(c) for c in group) for name, group in groups.items() if set(group) <= set(letters)}
    return Arrangement.grouped(value, own).leaf(value)


def _scaled(found: Network | None, scale: float) -> Network | None:
    return None if found is None else Network(found.leaves, found.out, found.scale * scale)
