"""What an op of psg_fx's own launches: recurrent layers are loops of ATen calls, the same on every device, inside an op
that inductor does not look into (`psg_fx/ops/recurrent/layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from psg_fx.ops.recurrent import cells as recurrent_cells
from psg_fx.ops.recurrent import layers as recurrent
from psg_fx.planner.cost import Work


def is_loop(target: Any) -> bool:
    """Whether a node's target is such an op."""
    return getattr(target, "namespace", None) == "psg_fx" and _body(target) is not None


def _body(op: Any) -> Any:
    """The Python of a loop."""
    return recurrent_cells.LOOPS.get(op) or getattr(recurrent, f"_{op.__name__.partition('.')[0]}", None)


def inside(op: Any, args: Sequence[Any], kwargs: Any = None) -> list[tuple[Work, torch.dtype]]:
    """The kernels of one call on tensors of these sizes, found by running its Python on tensors without content."""
    with _Seen() as seen:
        _body(op)(*args, **(kwargs or {}))
    return seen.works


class _Seen(TorchDispatchMode):
    """Every call that computes: views, sizes and fresh memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[tuple[Work, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        written = [t for t in pytree.tree_leaves(args if out is None else out) if isinstance(t, torch.Tensor)]
        if written and not func.is_view and "empty" not in func.__name__:
            read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.works.append((self._work(func, args, out, read, written), written[0].dtype))
        return out

    def _work(
        self, func: Any, args: Any, out: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> Work:
        flops, kind = max(t.numel() for t in written), "pointwise"
        product = getattr(torch.ops.aten, func.__name__.partition(".")[0].removesuffix("_"), None)  # addmm_ is addmm
        if product in flop_registry:
            flops, kind = int(flop_registry[product](*args, out_val=out)), "gemm"
        return Work(flops, _bytes(read), _bytes(written), kind)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
