"""A method: one way to contract two operands, with its formula, its cost and its torch code side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import sympy
import torch

from psg_fx.algebra.network import BATCH, Axes, Dense, Form
from psg_fx.planner.cost import Device, Work
from psg_fx.tensors import Size, permute, product, reshape


@dataclass(frozen=True)
class Arg:
    """An operand of a contraction as methods see it: its axes, form and dtype, never the tensor."""

    axes: Axes
    form: Form
    dtype: torch.dtype

    @property
    def dense(self) -> bool:
        """Whether all axes are in memory."""
        return isinstance(self.form, Dense)


@dataclass(frozen=True)
class Pair:
    """A contraction of two operands: `a`, `b` -> `out`; every axis not in `out` is summed.

    Axes of size 1 have no role.  self_product: both are the same tensor, if under other names of axes.  same: under the
    same names, too, so that the contraction is a square.
    """

    a: Arg
    b: Arg
    out: Axes
    sizes: Mapping[str, Size]
    same: bool = False
    self_product: bool = False

    @cached_property
    def _roles(self) -> dict[tuple[bool, bool, bool], Axes]:
        """The axes by where they are: in `a`, in `b`, in the result."""
        a, b, out = set(self.a.axes), set(self.b.axes), set(self.out)
        found: dict[tuple[bool, bool, bool], Axes] = {}
        for x in self.everything:
            if self.sizes[x] != 1:
                role = (x in a, x in b, x in out)
                found[role] = (*found.get(role, ()), x)
        return found

    @property
    def batch(self) -> Axes:
        """Axes of both operands that are kept."""
        return self._roles.get((True, True, True), ())

    @property
    def summed(self) -> Axes:
        """Axes of both operands that are summed."""
        return self._roles.get((True, True, False), ())

    @property
    def left(self) -> Axes:
        """Kept axes of `a` alone."""
        return self._roles.get((True, False, True), ())

    @property
    def right(self) -> Axes:
        """Kept axes of `b` alone."""
        return self._roles.get((False, True, True), ())

    @cached_property
    def everything(self) -> Axes:
        """Every axis of either operand."""
        return tuple(dict.fromkeys(self.a.axes + self.b.axes))

    def apart(self, form: type[Form]) -> tuple[Arg, Arg]:
        """The operand of this form, and the other."""
        return (self.a, self.b) if isinstance(self.a.form, form) else (self.b, self.a)

    def count(self, axes: Axes) -> Size:
        """The product of the sizes of `axes`."""
        return product(self.sizes[x] for x in axes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return torch.promote_types(self.a.dtype, self.b.dtype)

    def bytes(self, axes: Axes, dtype: torch.dtype | None = None) -> Size:
        """Bytes of a dense tensor with `axes`."""
        return self.count(axes) * (dtype or self.dtype).itemsize

    def moved(self) -> tuple[Size, Size]:
        """Bytes of both operands and of the result, each dense.  A square reads its operand once."""
        read_b = 0 if self.same else self.bytes(self.b.axes, self.b.dtype)
        return self.bytes(self.a.axes, self.a.dtype) + read_b, self.bytes(self.out)


class Method:
    """One way to contract a pair.  `name` is what plans print."""

    name: str
    own_op: ClassVar[bool] = False
    """Whether it computes with an op of psg_fx's own."""
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """On which kinds of devices it is offered."""
    widens: ClassVar[bool] = False
    """Whether its operands are made of the dtype of sums first."""

    def applies(self, p: Pair) -> bool:
        """Whether this method can compute `p`."""
        raise NotImplementedError

    def out(self, p: Pair) -> Axes:
        """The order in which `emit` leaves the axes of the result."""
        raise NotImplementedError

    def form(self, p: Pair) -> Form:
        """How `emit` stores the result."""
        return Dense()

    def dtype(self, p: Pair) -> torch.dtype:
        """The dtype of the result."""
        return p.dtype

    def bytes(self, p: Pair) -> Size:
        """Bytes of the result as it is stored."""
        return p.bytes(p.out, self.dtype(p))

    def work(self, p: Pair) -> Work:
        """Flops and bytes."""
        raise NotImplementedError

    def seconds(self, p: Pair, device: Device) -> float:
        """Predicted time; methods whose rate depends on sizes override this."""
        return device.seconds(self.work(p), p.dtype)

    def emit(self, p: Pair, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Compute the result from tensors laid out as `p.a.axes` and `p.b.axes` (or raw, for implicit forms)."""
        raise NotImplementedError


def is_gram_of_rows(p: Pair) -> bool:
    """Whether it is x[b,t,i] x[b,t',i] -> [b,t,t'], the inner products of the rows of each sample."""
    if not (p.self_product and p.a.dense and p.summed and p.batch == (BATCH,) and len(p.left) == len(p.right) == 1):
        return False
    renamed = tuple(p.left[0] if x == p.right[0] else x for x in p.b.axes)
    return renamed == p.a.axes and {BATCH, *p.left, *p.right} == set(p.out)


def least(*sizes: Size) -> Size:
    """The smallest of sizes, which may be symbols."""
    return sympy.Min(*sizes) if any(isinstance(size, sympy.Expr) for size in sizes) else min(sizes)


def arrange(tensor: torch.Tensor, have: Axes, want: tuple[Axes, ...]) -> torch.Tensor:
    """Permute a dense tensor with axes `have` into the groups `want`, each flattened into one dim.

    Axes of no group have size 1.
    """
    order = [have.index(x) for group in want for x in group]
    rest = [i for i in range(len(have)) if i not in order]
    shape = [product(tensor.shape[have.index(x)] for x in group) for group in want]
    return reshape(permute(tensor, order + rest), shape)


def expand_to(tensor: torch.Tensor, have: Axes, want: Axes) -> torch.Tensor:
    """Permute and add dims of size 1, so that the tensor broadcasts over `want`.  Axes not in `want` have size 1."""
    kept = [x for x in want if x in have]
    order = [have.index(x) for x in kept]
    rest = [i for i in range(len(have)) if i not in order]
    shape = [tensor.shape[have.index(x)] if x in have else 1 for x in want]
    return reshape(permute(tensor, order + rest), shape)
