"""The kernels of psg_fx (`psg_fx/ops/products/tile_kernels.py`, `patch_kernels.py`, `gram_kernels.py`,
`cell_kernels.py`, `weighted_sum_kernels.py`) without a device.

    python -m no_device.tiles compiled
    TRITON_INTERPRET=1 python -m no_device.tiles executed
    python -m no_device.tiles steps

compiled: registers, stack and shared memory for each kind of device.  executed: by triton's interpreter, against
products in float64.  steps: small models whose plans have the kernels wherever they can, compiled by inductor and
executed by the interpreter.  Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from no_device import cells, patches, sums
from psg_fx.ops.products import gram_products, tile_products
from psg_fx.planner import rates

SHAPES = ((3, 70, 50, 90), (2, 130, 33, 200), (1, 1, 1, 1), (2, 64, 64, 64), (1, 256, 40, 128), (2, 3, 200, 5))
"""Samples, rows, positions, columns: most do not divide the tiles."""

ARCHITECTURES = (80, 90)
TILES = ((64, 64), (128, 128))
INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "fma.rn.f32", "cp.async.c")
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def executed() -> dict[str, dict[str, float]]:
    """What was multiplied -> relative errors: of the squared norms, those of the product if it is kept, and of the
    product in units of its dtype.
    """
    from psg_fx.ops.products import tile_kernels

    found = {}
    for shape, dtype, keep, layout in _cases():
        a, b = _operands(shape, dtype, layout)
        down, across = tile_products.tiles(a.shape[1], b.shape[2])
        squares = torch.full((a.shape[0], down * across), torch.nan)
        product = torch.full((a.shape[0], a.shape[1], b.shape[2]), torch.nan, dtype=keep) if keep else None
        tile = tile_products.tile(a.shape[1], b.shape[2])
        meta = tile_kernels.meta(dtype, tile, product is not None, depth=a.shape[2]) | {"AS_FLOAT32": True}
        tile_kernels.tile_kernel[tile_kernels.grid(squares)](
            *tile_kernels.arguments(a, b, product, squares), **meta
        )  # AS_FLOAT32: the interpreter multiplies bfloat16 wrongly
        right = a.double() @ b.double()
        norms = (right if product is None else product.double()).square().sum((1, 2))
        errors = {"error": float(((squares.double().sum(1) - norms) / norms).abs().max())}
        if product is not None:
            off = (product.double() - right).abs().max() / right.abs().max()
            errors["product"] = float(off) / torch.finfo(product.dtype).eps
        found[f"{'x'.join(map(str, shape))} {_named(dtype)} {layout}{_kept(dtype, keep)}"] = errors
    return found | patches.executed(_named) | _grams_executed() | cells.executed(_named) | sums.executed(_named)


def _grams_executed() -> dict[str, dict[str, float]]:
    """Samples x elements x positions x elements -> relative errors of the inner products of Gram matrices."""
    from psg_fx.ops.products import gram_kernels

    found = {}
    for shape in SHAPES:
        for dtype in gram_products.DTYPES:
            a, y = _operands(shape, dtype, "[b,t,i]")
            x = a.mT
            sums = torch.full((2, x.shape[0], gram_products.tiles(x.shape[1])), torch.nan)
            meta = gram_kernels.meta(gram_products.SIDE) | {"AS_FLOAT32": True}
            gram_kernels.gram_kernel[gram_kernels.grid(sums)](*gram_kernels.arguments(x, y, sums), **meta)
            both = (x.double() @ x.double().mT) * (y.double() @ y.double().mT)
            right = torch.stack([both.sum((1, 2)), both.diagonal(0, 1, 2).sqrt().sum(1)])
            error = float(((sums.double().sum(2) - right) / right).abs().max())
            found[f"gram {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"] = {"error": error}
    return found


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kept(dtype: torch.dtype, keep: torch.dtype | None) -> str:
    if keep is None:
        return ""
    return ", kept" if keep is dtype else f", kept in {_named(keep)}"


def _cases() -> Iterator[tuple[tuple[int, ...], torch.dtype, torch.dtype | None, str]]:
    for shape in SHAPES:
        for dtype in tile_products.DTYPES:
            yield shape, dtype, dtype, "[b,t,i]"
        yield shape, torch.float32, torch.bfloat16, "[b,t,i]"
    yield SHAPES[0], torch.float32, None, "[b,t,i]"
    yield SHAPES[0], torch.bfloat16, None, "[b,i,t]"
    yield SHAPES[1], torch.float32, torch.float32, "[t,b,i]"


def _operands(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """a[n, i, t], b[n, t, o], as they are stored where `a` is an activation with such axes."""
    torch.manual_seed(0)
    n, i, t, o = shape
    if layout == "[b,i,t]":
        a, b = torch.randn(n, i, t), torch.randn(n, o, t).mT
    elif layout == "[t,b,i]":
        a, b = torch.randn(t, n, i).permute(1, 2, 0), torch.randn(t, n, o).transpose(0, 1)
    else:
        a, b = torch.randn(n, t, i).mT, torch.randn(n, t, o)
    return a.to(dtype), b.to(dtype)


def compiled() -> dict[str, dict[str, Any]]:
    """Kernel -> registers a thread, bytes of stack, shared bytes, and the instructions that multiply."""
    found = {}
    for architecture in ARCHITECTURES:
        for dtype in (torch.float32, torch.bfloat16):
            for tile in TILES:
                for keep in dict.fromkeys((None, dtype, torch.bfloat16)):
                    named = f"{_named(dtype)} {tile[0]}x{tile[1]}{_kept(dtype, keep)}"
                    found[f"sm_{architecture} {named}"] = _told(_binary(architecture, dtype, tile, keep))
            for named, (kernel, *more) in patches.signatures(POINTERS[dtype], dtype):
                made = _compiled(kernel, architecture, *more)
                found[f"sm_{architecture} patches {_named(dtype)} {named}"] = _told(made)
        found[f"sm_{architecture} bfloat16 gram"] = _told(_gram_binary(architecture))
        for dtype in (torch.float32, torch.bfloat16):
            for name, (kernel, pointers, meta) in cells.signatures(POINTERS[dtype]).items():
                made = _compiled(kernel, architecture, pointers, meta, {})
                found[f"sm_{architecture} {_named(dtype)} {name}"] = _told(made) | {"instructions": {}}
            for name, (kernel, pointers, meta) in sums.signatures(POINTERS[dtype], dtype):
                found[f"sm_{architecture} {_named(dtype)} {name}"] = _told(
                    _compiled(kernel, architecture, pointers, meta, {})
                )
    return found


def _told(made: Any) -> dict[str, Any]:
    from no_device.count import resources

    return resources(made) | {"instructions": {k: made.asm["ptx"].count(k) for k in INSTRUCTIONS}}


def _binary(architecture: int, dtype: torch.dtype, tile: tuple[int, int], keep: torch.dtype | None) -> Any:
    """For operands [b, t, i] and [b, t, o] whose sizes are multiples of 16."""
    from psg_fx.ops.products import tile_kernels

    pointers = {"a": POINTERS[dtype], "b": POINTERS[dtype], "product": POINTERS[keep or dtype], "squares": "*fp32"}
    meta = tile_kernels.meta(dtype, tile, keep is not None)
    return _compiled(tile_kernels.tile_kernel, architecture, pointers, meta, {"a_i": 1, "b_o": 1, "p_o": 1})


def _gram_binary(architecture: int) -> Any:
    """For operands [b, t, i] and [b, t, o] in bfloat16 whose sizes are multiples of 16."""
    from psg_fx.ops.products import gram_kernels

    pointers = dict.fromkeys(("x", "y"), POINTERS[torch.bfloat16]) | {"sums": "*fp32"}
    meta = gram_kernels.meta(gram_products.SIDE)
    return _compiled(gram_kernels.gram_kernel, architecture, pointers, meta, {"x_i": 1, "y_o": 1})


def _compiled(kernel: Any, architecture: int, pointers: dict[str, str], meta: dict[str, Any], ones: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constant = {name: meta[name] for name in names if name in meta} | ones
    types = dict.fromkeys(names, "i32") | pointers | dict.fromkeys(constant, "constexpr")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constant}
    source = ASTSource(kernel, types, constexprs=constant, attrs=aligned)
    options = {name: meta[name] for name in ("num_warps", "num_stages")}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def steps() -> dict[str, dict[str, Any]]:
    """Model and quantity -> which kernels of psg_fx it has, and the worst relative error of an output."""
    from _results import printed_by
    from without_cuda import SMALL

    import psg_fx
    from no_device import interpret
    from no_device.retarget import compiled_for_cuda
    from psg_fx import ClippedSum, Norms, zoo

    free = replace(rates.H100, launch=0.0, flops={**rates.H100.flops, ("bmm", torch.float32): 1e20})
    found = {}
    for model in ("encoder", "simplecnn"):
        for quantity in (Norms(), ClippedSum(1.0)):
            ex = zoo.example(model, **SMALL[model])
            on = {"psg_fx.fused_kernels": True}
            step = psg_fx.transform(ex.model, ex.loss_fn, quantities=quantity, batch_dim=ex.batch_dim, options=on)
            with mock.patch.object(rates, "H100", free), tempfile.NamedTemporaryFile(suffix=".pt") as file:
                made = compiled_for_cuda(lambda step=step, ex=ex: step(ex.inputs, ex.targets), run=True, binaries=False)
                interpret.keep_for(Path(file.name), made)
                own = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
                answered = printed_by(interpret.__file__, file.name, **own)
            kernels = sorted(
                name for name in made.kernels if name.startswith(("tile_kernel", "patch_kernel", "weighted_sum_kernel"))
            )
            found[f"{model} {quantity.field}"] = answered | {"kernels": kernels}
            torch._dynamo.reset()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"compiled": compiled, "executed": executed, "steps": steps}[sys.argv[1]]()))
