"""The kernels of recurrent cells (`psg_fx/ops/recurrent/cell_kernels.py`) without a device, as in `tiles.py`.

Executed by the interpreter they are held against the cells of torch's calls in float64, in units of the dtype that is
stored, of the largest element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psg_fx.ops.recurrent import cells as recurrent_cells

SHAPES = ((3, 5), (1, 1), (7, 64), (2, 300))
"""Rows and units: most do not divide a block."""


def executed(named: Callable[[torch.dtype], str]) -> dict[str, dict[str, float]]:
    """Cell, rows x units and dtype -> the worst error of what it writes, in units of the dtype."""
    from psg_fx.ops.recurrent import cell_kernels

    found = {}
    for shape in SHAPES:
        for dtype in recurrent_cells.DTYPES:
            for cell, (kernel, given, written) in _cells(shape).items():
                stored = [value.to(dtype) for value in given]
                exact = [value.double() for value in stored]
                getattr(recurrent_cells, f"_{cell}")(*exact)
                cell_kernels.launch(getattr(cell_kernels, kernel), tuple(stored), *shape)
                units = max(_error(stored[k], exact[k]) for k in written) / torch.finfo(dtype).eps
                found[f"{cell} {shape[0]}x{shape[1]} {named(dtype)}"] = {"error": 0.0, "product": units}
    return found


def _error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).abs().max() / right.abs().max())


def _cells(shape: tuple[int, int]) -> dict[str, tuple[str, list[Tensor], tuple[int, ...]]]:
    """Cell -> its kernel, what it is called with, and which of these it writes."""
    torch.manual_seed(0)
    rows, units = shape

    def drawn(parts: int = 1) -> Tensor:
        return 2 * torch.randn(rows, parts * units)

    def fresh(parts: int = 1) -> Tensor:
        return torch.full((rows, parts * units), torch.nan)

    return {
        "lstm_cell": ("lstm_kernel", [drawn(4), drawn(), fresh(), fresh(), fresh()], (0, 2, 3, 4)),
        "lstm_cell_backward": (
            "lstm_backward_kernel",
            [drawn(), drawn(), drawn(4), drawn(), drawn(), fresh(4)],
            (1, 5),
        ),
        "gru_cell_backward": (
            "gru_backward_kernel",
            [drawn(), drawn(3), drawn(), drawn(), drawn(), fresh(3), fresh(3)],
            (4, 5, 6),
        ),
        "gru_cell": ("gru_kernel", [drawn(3), drawn(3), drawn(), fresh(3), fresh(), fresh()], (3, 4, 5)),
    }


def signatures(pointer: str) -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernel -> itself, the types of its pointers, and what is compiled into it."""
    from psg_fx.ops.recurrent import cell_kernels

    sizes, meta = ("count", "units"), {"BLOCK": cell_kernels.BLOCK, "num_warps": 4, "num_stages": 1}
    found = {}
    for name in ("lstm_kernel", "lstm_backward_kernel", "gru_kernel", "gru_backward_kernel"):
        kernel = getattr(cell_kernels, name)
        pointers = {each: pointer for each in kernel.arg_names if each not in (*sizes, "BLOCK")}
        found[name] = kernel, pointers, meta
    return found
