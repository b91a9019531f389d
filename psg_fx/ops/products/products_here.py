"""`psg_fx::products_here` and `squares_here`: products of each sample's matrices, their squares summed on the way.

    p[n, i, o] = Σ_t x[n, t, i] y[n, t, o],    squares[n] = Σ_{i, o} p[n, i, o]²

For float32 on a CPU, in C++ (`ops/cpp/products.cpp`); where nothing compiles, plain torch.  `squares_here` gives the
squares alone, and the product is never in memory.  The operands may lie in memory in any way: they are packed.
Rounded, p is kept in bfloat16, and the squares are those of what is kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import define_op
from psg_fx.torch_private.compiler import allocated
from psg_fx.torch_private.native import library, passed, threads

LIBRARY = "products"


def products(x: Tensor, y: Tensor, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """x[n, t, i], y[n, t, o] of float32 -> p[n, i, o], in float32 or rounded to bfloat16, and squares[n]."""
    found: tuple[Tensor, Tensor] = _PRODUCTS(x, y, rounded)
    return found


def squares(x: Tensor, y: Tensor) -> Tensor:
    """The squares alone."""
    found: Tensor = _SQUARES(x, y)
    return found


def _products(x: Tensor, y: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
    compiled = library(LIBRARY) if x.device.type == "cpu" else None
    if compiled is None:
        return _products_of_torch(x, y, rounded)
    n, i, o = x.shape[0], x.shape[2], y.shape[2]
    product, found = allocated((n, i, o), (i * o, o, 1), _kept(x, rounded)), x.new_empty(n)
    _run(compiled, x, y, product, found)
    return product, found


def _squares(x: Tensor, y: Tensor) -> Tensor:
    compiled = library(LIBRARY) if x.device.type == "cpu" else None
    if compiled is None:
        return _products_of_torch(x, y, False)[1]
    found = x.new_empty(x.shape[0])
    _run(compiled, x, y, None, found)
    return found


def _kept(x: Tensor, rounded: bool) -> torch.dtype:
    return torch.bfloat16 if rounded else x.dtype


def _run(compiled: Any, x: Tensor, y: Tensor, product: Tensor | None, found: Tensor) -> None:
    strides = (ctypes.c_int64 * 6)(*x.stride(), *y.stride())
    halves = int(product is not None and product.dtype is torch.bfloat16)
    compiled.products(*map(passed, (x, y, product, found, *x.shape, y.shape[2])), strides, passed(halves), threads())


def _products_of_torch(x: Tensor, y: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
    product = torch.bmm(x.mT, y).to(_kept(x, rounded))
    return product, product.to(x.dtype).square().sum((1, 2))


def _products_fake(x: Tensor, y: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
    product = x.new_empty((x.shape[0], x.shape[2], y.shape[2]), dtype=_kept(x, rounded))
    return product, x.new_empty(x.shape[0])


_PRODUCTS = define_op(
    "products_here(Tensor x, Tensor y, bool rounded) -> (Tensor, Tensor)", _products, _products_fake,
    _products_of_torch, LIBRARY,
)  # fmt: skip
_SQUARES = define_op(
    "squares_here(Tensor x, Tensor y) -> Tensor", _squares, lambda x, y: x.new_empty(x.shape[0]),
    lambda x, y: _products_of_torch(x, y, False)[1], LIBRARY,
)  # fmt: skip


@register_flop_formula([torch.ops.psg_fx.products_here, torch.ops.psg_fx.squares_here])
def _flops(x: Sequence[int], y: Sequence[int], *rest: Any, **shapes: Any) -> int:
    """2 · n·t·i·o of the product, and 2 · n·i·o of the squares."""
    return 2 * x[0] * x[2] * y[2] * (x[1] + 1)
