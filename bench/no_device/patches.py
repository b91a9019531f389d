"""The kernel of gradients of convolutions (`ops/products/patch_kernels.py`) without a device: what `tiles.py` does with
the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from psg_fx.ops.products import patch_products, tile_products
from psg_fx.ops.products.window import Window

WINDOWS = {
    "3x3": ((2, 6, 9, 8), 70, Window(1, [3, 3], [1, 1], [1, 1], [1, 1])),
    "3x2 in steps": ((2, 4, 9, 9), 5, Window(1, [3, 2], [2, 1], [1, 1], [1, 1])),
    "2x3 of groups, with holes": ((3, 6, 11, 7), 3, Window(3, [2, 3], [1, 2], [0, 2], [2, 1])),
    "1x1": ((1, 1, 1, 1), 1, Window(1, [1, 1], [1, 1], [0, 0], [1, 1])),
    "3x3 in tiles of 128": ((1, 16, 6, 6), 130, Window(1, [3, 3], [1, 1], [0, 0], [1, 1])),
}
"""Sizes of x, channels of y in a group, and how x is read."""


def executed(named: Callable[[torch.dtype], str]) -> dict[str, dict[str, float]]:
    """Window and dtype -> relative errors: of the squared norm, and of the product in units of its dtype."""
    from psg_fx.ops.products import patch_kernels, tile_kernels

    found = {}
    for name, (sizes, outputs, window) in WINDOWS.items():
        for dtype, keep, last in _kinds():
            torch.manual_seed(0)
            x, places = torch.randn(*sizes).to(dtype), math.prod(window.out_space(sizes[2:]))
            y = torch.randn(sizes[0] * window.groups, outputs, places).to(dtype)
            x = x.to(memory_format=torch.channels_last) if last else x
            columns = sizes[1] // window.groups * window.entries
            tile = patch_products.tile(y, x, window)
            down, across = tile_products.tiles(outputs, columns, tile)
            squares = torch.full((y.shape[0], down * across), torch.nan)
            product = torch.full((y.shape[0], outputs, columns), torch.nan, dtype=dtype) if keep else None
            meta = patch_kernels.meta(dtype, window, tile, keep) | {"AS_FLOAT32": True}
            patch_kernels.patch_kernel[tile_kernels.grid(squares)](
                *patch_kernels.arguments(y, x, window, product, squares), **meta
            )  # AS_FLOAT32: the interpreter multiplies bfloat16 wrongly
            right = y.double() @ window.patches(x.double())
            norms = (right if product is None else product.double()).square().sum((1, 2))
            errors = {"error": float(((squares.double().sum(1) - norms) / norms).abs().max())}
            if product is not None:
                off = (product.double() - right).abs().max() / right.abs().max()
                errors["product"] = float(off) / torch.finfo(dtype).eps
            kept, layout = ", kept" if keep else "", ", channels last" if last else ""
            found[f"patches {name} {named(dtype)}{kept}{layout}"] = errors
    return found


def _kinds() -> Iterator[tuple[torch.dtype, bool, bool]]:
    """Dtypes, whether the product is kept, and whether channels lie last."""
    yield from ((dtype, True, False) for dtype in tile_products.DTYPES)
    yield torch.float32, False, False
    yield torch.float32, True, True


def signatures(pointer: str, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """For 3x3 a name, and the kernel, the types of its pointers, what is compiled into it, and strides of 1."""
    from psg_fx.ops.products import patch_kernels

    pointers = dict.fromkeys(("y", "x", "product"), pointer) | {"squares": "*fp32"}
    for tile in dict.fromkeys(patch_products.tile_of(size, size, dtype) for size in (64, 128)):
        for keep in (False, True):
            meta = patch_kernels.meta(dtype, Window(1, [3, 3], [1, 1], [1, 1], [1, 1]), tile, keep)
            for lie, ones in ("", {"y_t": 1, "x_w": 1, "p_i": 1}), (", strided", {}):
                name = f"{tile[0]}x{tile[1]}{', kept' if keep else ''}{lie}"
                yield name, (patch_kernels.patch_kernel, pointers, meta, ones)
