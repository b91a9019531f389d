"""Where inductor's tiled loops in C++ write sums, and what they keep meanwhile.

The last tile of a loop holds less than a vector.  What is summed over inner loops is written for a whole vector there:
into the next row, or into memory of others.  In torch 2.11 that is so where another loop lies between the tiled one and
those of the sum (https://github.com/pytorch/pytorch/issues/181618); since 2.13 where one of the sum is tiled, too
(https://github.com/pytorch/pytorch/issues/196681).  Loops that follow each other side by side are written right.

Up to torch 2.13, values that only loops fused by their outer dims read lie in a buffer for one place of these, also
where such a dim is tiled: then the last place of the tile is read for all (https://github.com/pytorch/pytorch/pull/185855).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from psg_fx.torch_private.patching import wrapped_here


@contextlib.contextmanager
def tiles_apart() -> Iterator[None]:
    """While open, loops that this thread has inductor write touch what belongs to their own tile, place by place."""
    from torch._inductor.codegen import cpp  # slow to import, and only who compiles needs it

    kernel, fused = (getattr(cpp, name, None) for name in ("CppKernelProxy", "OuterLoopFusedSchedulerNode"))
    with (
        wrapped_here(kernel, "aggregate_reduction_buffers", _sums_end_with_their_tile),
        wrapped_here(fused, "check_outer_fusion_loop_level_attr", _one_place_each),
    ):
        yield


def _sums_end_with_their_tile(original: Callable[..., None]) -> Callable[..., None]:
    def aggregate(self: Any, summed_within: bool, tiled: Any) -> None:
        original(self, summed_within or _is_summed_within(self.loop_nest.loops, tiled), tiled)

    return aggregate


def _is_summed_within(loops: list[Any], tiled: Any) -> bool:
    """Whether there are sums over loops inside of the tiled one, and that is none of theirs."""
    if tiled is None or tiled.is_reduction:
        return False
    return any(loop.is_reduction for loop in loops[loops.index(tiled) + 1 :])


def _one_place_each(original: Callable[..., bool]) -> Callable[..., bool]:
    from torch._inductor.virtualized import V

    def fit(self: Any, kernels: list[Any], depth: int) -> bool:
        """False, and each loop is written for itself."""
        outer = [loop for kernel in kernels for loop in kernel.loop_nest.loops[:depth]]
        keeps = bool(getattr(V.local_buffer_context, "local_buffers", None))
        return not (keeps and any(loop.steps != 1 for loop in outer)) and original(self, kernels, depth)

    return fit
