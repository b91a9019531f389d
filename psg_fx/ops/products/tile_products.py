"""`psg_fx::tile_squares` and `psg_fx::tile_product`: batched matrix products with the squares of their elements summed
while a tile of the product lies in registers.

    p[n, i, o] = Σ_t a[n, i, t] b[n, t, o];        squares[n, k] = Σ_{(i, o) in tile k} p[n, i, o]²

`tile_squares` gives the squares alone, and the product is never in memory; `tile_product` gives both.  On a CUDA device
they are kernels of Triton (`tile_kernels.py`), which inductor takes into its graph; elsewhere plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils.flop_counter import register_flop_formula

from psg_fx.ops.define import defined_later
from psg_fx.tensors import HALF, Size, accumulation_dtype

DTYPES = (torch.float32, *HALF)
"""What the kernels multiply: no matrix units are used for float64, where `bmm` has them."""


def tile(rows: Size, columns: Size) -> tuple[int, int]:
    """Rows and columns of a tile for a product of this size: 128 where it has as many, else 64."""
    return (128, 128) if rows >= 128 and columns >= 128 else (64, 64)


def tiles(rows: Size, columns: Size, size: tuple[int, int] | None = None) -> tuple[Size, Size]:
    """Their numbers; size: of a tile, if it is another."""
    height, width = size or tile(rows, columns)
    return -(-rows // height), -(-columns // width)


def tile_squares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[n, i, t], b[n, t, o] of one dtype of `DTYPES` -> squares[n, tiles], in float32."""
    found: torch.Tensor = _ops()[0](a, b)
    return found


def tile_product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and before it the product in `dtype`, that of the operands by default; the squares are those of the
    product as it is kept, so that what is scaled by its norm has the norm that is wanted.
    """
    product, squares = _ops()[1](a, b, a.dtype if dtype is None else dtype)
    return product, squares


def is_tiled(node: Node) -> bool:
    """Whether a node of a graph is one of both ops."""
    return str(node.target) in ("psg_fx.tile_squares.default", "psg_fx.tile_product.default")


@functools.cache
def _ops() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both ops, registered when they are first wanted: for that torch loads Triton, where it is."""
    squares = _registered("psg_fx::tile_squares", _squares)
    product = _registered("psg_fx::tile_product", _product)
    register_flop_formula([torch.ops.psg_fx.tile_squares, torch.ops.psg_fx.tile_product])(_flops)
    return squares, product


defined_later(_ops, "tile_squares", "tile_product")


def _registered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    made: Any = torch.library.triton_op(name, function, mutates_args=())
    made.register_fake({_squares: _squares_fake, _product: _product_fake}[function])
    registered: Callable[..., Any] = made
    return registered


def _squares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.device.type == "cuda":
        squares = _squares_fake(a, b)
        _launch(a, b, None, squares)
        return squares
    return by_torch(a, b, accumulation_dtype(a.dtype))[1]


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if a.device.type == "cuda":
        product, squares = _product_fake(a, b, dtype)
        _launch(a, b, product, squares)
        return product, squares
    return by_torch(a, b, dtype)


def _launch(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor | None, squares: torch.Tensor) -> None:
    from psg_fx.ops.products import tile_kernels  # Triton is loaded where there is something to launch

    tile_kernels.launch(a, b, product, squares, tile(a.shape[1], b.shape[2]))


def _squares_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    down, across = tiles(a.shape[1], b.shape[2])
    return a.new_empty((a.shape[0], down * across), dtype=accumulation_dtype(a.dtype))


def _product_fake(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=dtype), _squares_fake(a, b)


def by_torch(
    a: torch.Tensor, b: torch.Tensor, kept: torch.dtype, size: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both ops compute, in ops of torch.  kept: the dtype of the product.  size: of a tile, if it is another."""
    dtype = accumulation_dtype(a.dtype)
    product = torch.bmm(a.to(dtype), b.to(dtype)).to(kept)
    (n, rows, columns), (height, width) = product.shape, size or tile(a.shape[1], b.shape[2])
    down, across = tiles(rows, columns, (height, width))
    whole = F.pad(product.to(dtype).square(), (0, across * width - columns, 0, down * height - rows))
    return product, whole.reshape(n, down, height, across, width).sum((2, 4)).reshape(n, down * across)


def _flops(a: Sequence[int], b: Sequence[int], *rest: Any, **shapes: Any) -> int:
    """2 · n·i·t·o of the product, and 2 · n·i·o of the squares."""
    return 2 * a[0] * a[1] * b[2] * (a[2] + 1)
