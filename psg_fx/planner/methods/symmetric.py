"""Gram matrices of positions by half: they are symmetric, and their upper right block is never computed."""

from __future__ import annotations

import torch

from psg_fx.algebra.network import ROWS, Axes, Form, Symmetric
from psg_fx.planner.cost import Work
from psg_fx.planner.methods.base import Method, Pair, arrange, is_gram_of_rows
from psg_fx.tensors import Size, accumulation_dtype

_FROM = 32
"""Positions from which two products of a part each are faster than one of the whole."""

_VECTOR = 16
"""Positions that are computed at once."""


def _cut(positions: int) -> int:
    """The columns of the first product: about half of them, in whole vectors."""
    return positions // (2 * _VECTOR) * _VECTOR


class HalfGram(Method):
    """G[b,t,t'] = Σ_i x[b,t,i] x[b,t',i] as two products, G[:, :, :h] and G[:, h:, h:]: three quarters of the flops.

    The result is stored as those two, flattened one after the other: `Symmetric(h)`.
    """

    name = "half-gram"

    def applies(self, p: Pair) -> bool:
        if not is_gram_of_rows(p):
            return False
        if ROWS in p.left + p.right:  # their number is another at the next call, and how it is stored depends on it
            return False
        return p.sizes[p.left[0]] not in range(_FROM)

    def out(self, p: Pair) -> Axes:
        return (*p.batch, *p.left, *p.right)

    def form(self, p: Pair) -> Form:
        return Symmetric(_cut(p.sizes[p.left[0]]))

    def work(self, p: Pair) -> Work:
        samples, k, t = p.count(p.batch), p.count(p.summed), p.sizes[p.left[0]]
        out = samples * _entries(t) * accumulation_dtype(p.dtype).itemsize
        return Work(2 * samples * k * _entries(t), 2 * p.bytes(p.a.axes), 2 * out, "bmm", 3, samples * _entries(t) / 2)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = arrange(a, p.a.axes, (p.batch, p.left, p.summed)).to(accumulation_dtype(p.dtype))
        cut = _cut(x.shape[1])
        first = torch.bmm(x, x[:, :cut].transpose(1, 2))
        rest = torch.bmm(x[:, cut:], x[:, cut:].transpose(1, 2))
        return torch.cat([first.flatten(1), rest.flatten(1)], 1)


class HalfDot(Method):
    """Σ_{t,t'} G[b,t,t'] H[b,t,t'] of symmetric matrices by half: what lies below the diagonal blocks counts twice."""

    name = "half-dot"

    def applies(self, p: Pair) -> bool:
        if not (isinstance(p.a.form, Symmetric) and isinstance(p.b.form, Symmetric)):
            return False
        return set(p.a.axes) == set(p.b.axes) and self.out(p) == p.out

    def out(self, p: Pair) -> Axes:
        return p.a.axes[:-2]

    def work(self, p: Pair) -> Work:
        entries = p.count(p.out) * _entries(p.sizes[p.a.axes[-1]])
        return Work(3 * entries, (1 if p.same else 2) * entries * p.dtype.itemsize, p.bytes(p.out))

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert isinstance(p.a.form, Symmetric)
        cut, product = p.a.form.cut, a * b
        positions = p.sizes[p.a.axes[-1]]
        first = product[:, : positions * cut].reshape(-1, positions, cut).sum(2)  # row by row: a long sum rounds more
        rest = product[:, positions * cut :].reshape(first.shape[0], positions - cut, positions - cut).sum(2)
        return first.sum(1) + first[:, cut:].sum(1) + rest.sum(1)


def _entries(positions: Size) -> Size:
    """How many entries are stored, about."""
    return positions * positions * 3 / 4
