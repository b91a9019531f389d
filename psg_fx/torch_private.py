"""Every private torch API that psg_fx uses, in one place, with what it is for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.source import ConstantSource
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import _disable_current_modes as no_modes

aten = torch.ops.aten

__all__ = [
    "autocast_key",
    "core_decompositions",
    "fake_batch",
    "no_modes",
    "partition",
    "preserve_node_meta",
    "rnn_decompositions",
]


def core_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Torch's decompositions into core ATen ops."""
    return dict(core_aten_decompositions())


@contextlib.contextmanager
def fake_batch() -> Iterator[tuple[Callable[[torch.Tensor, bool], torch.Tensor], Callable[[], bool]]]:
    """A maker of fake tensors `(like, stacked)` whose first size, if stacked, is a batch size of their own, and a
    question: is that size still a symbol?
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    size = 3
    made: list[torch.Tensor] = []

    def example(like: torch.Tensor, stacked: bool) -> torch.Tensor:
        shape = [int(s) for s in like.shape[stacked:]]
        real = torch.empty([size, *shape] if stacked else shape, dtype=like.dtype, device="meta")
        dims = [DimDynamic.DUCK] * stacked + [DimDynamic.STATIC] * len(shape)
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        with mode:
            sized = mode.from_tensor(real, symbolic_context=context, source=ConstantSource(f"value_{len(made)}"))
            fake = torch.empty(sized.shape, dtype=like.dtype, device=like.device)
        made.extend([fake] if stacked else [])
        return fake

    def is_symbol() -> bool:
        sizes: list[Any] = [t.shape[0] for t in made]
        return all(isinstance(s, torch.SymInt) and not s.node.expr.is_number for s in sizes)

    yield example, is_symbol


def rnn_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Torch's own decompositions of the recurrent layers, which unroll them into linear layers and pointwise ops."""
    ops = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
    return dict(get_decompositions(ops))  # type: ignore[arg-type]


def partition(joint: GraphModule, num_fwd_outputs: int) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph with placeholders `primals_*` and `tangents_*` into a forward and a backward graph, with the
    fewest bytes saved between them (Chen et al. 2016, arXiv:1604.06174, by min-cut).
    """
    forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_fwd_outputs)
    return forward, backward


def autocast_key(device_type: str) -> tuple[bool, torch.dtype] | None:
    """The autocast state that a capture depends on."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return True, torch.get_autocast_dtype(device_type)
