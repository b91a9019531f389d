"""Contractions of data with a parameter: linear, mm, bmm, addmm, baddbmm, matmul, mv, einsum.

All are y = einsum(X, W), and the gradient of W is the einsum of X and ȳ over what W does not index.
"""

from __future__ import annotations

import torch

from psg_fx.network import BATCH, Network
from psg_fx.rules import network, rule
from psg_fx.sites import Site, Value

aten = torch.ops.aten


@rule(aten.linear.default, params={"weight": 1, "bias": 2})
def linear(site: Site) -> dict[str, Network | None]:
    """y[b,t,o] = Σ_i x[b,t,i] W[o,i] + bias[o]; t stands for any middle axes.

    weight: x[b,t,i] ȳ[b,t,o] -> [b,o,i]        (Goodfellow 2015, arXiv:1510.01799)
    bias:   ȳ[b,t,o] -> [b,o]
    """
    x, ybar = site.input(0), site.cotangent
    return {"weight": network("b t* i, b t* o -> b o i", x, ybar), "bias": network("b t* o -> b o", ybar)}


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
    bias = network("b t* o -> b o", site.cotangent) if site.input(0).ndim == 1 else None
    scaled = {name: _scaled(found_network, alpha) for name, found_network in found.items()}
    return {**scaled, "bias": _scaled(bias, beta)}


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
        "a": _side(site, b, right, left, out, site.input(0) if a is b else a),
        "b": _side(site, a, left, right, out, b),
    }


def _side(site: Site, x: Value, x_letters: str, w_letters: str, y_letters: str, w: Value) -> Network | None:
    """x[..] ȳ[..] -> [b, W's letters]; what W does not index is summed."""
    ybar = site.cotangent
    if x.samples is None or ybar.samples is None or w.samples is not None:
        return None
    sample = x_letters[x.samples.dim]
    if sample in w_letters or y_letters.index(sample) != ybar.samples.dim:
        return None
    sizes = {**dict(zip(x_letters, x.shape, strict=True)), **dict(zip(y_letters, ybar.shape, strict=True))}
    if any(sizes.get(letter, size) != size for letter, size in zip(w_letters, w.shape, strict=True)):
        return None  # the parameter broadcasts along a batch dim
    if any(letter not in x_letters and letter not in y_letters for letter in w_letters):
        return None
    names = {letter: letter if letter in w_letters else "t*" for letter in x_letters + y_letters}
    x_term, y_term = _term(x_letters, sample, names), _term(y_letters, sample, names)
    if x_term is None or y_term is None:
        return None
    # letters called b or t would clash with the samples and the star
    safe = {letter: f"{letter}_" if letter in (BATCH, "t") else letter for letter in w_letters}
    spec = f"{' '.join(safe.get(n, n) for n in x_term)}, {' '.join(safe.get(n, n) for n in y_term)} -> "
    return network(spec + " ".join([BATCH, *(safe[letter] for letter in w_letters)]), x, ybar)


def _term(letters: str, sample: str, names: dict[str, str]) -> list[str] | None:
    """The term of `network` for a value with these letters: the summed ones must be neighbours to share one star."""
    rest = [names[letter] for letter in letters if letter != sample]
    stars = [i for i, name in enumerate(rest) if name == "t*"]
    if stars and stars[-1] - stars[0] + 1 != len(stars):
        return None
    term = [BATCH] + [name for i, name in enumerate(rest) if name != "t*" or i == stars[0]]
    return term if "t*" in term else [BATCH, "t*", *term[1:]]


def _scaled(found: Network | None, scale: float) -> Network | None:
    return None if found is None else Network(found.leaves, found.out, found.scale * scale)
