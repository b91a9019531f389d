"""Kernels in C++, which inductor writes several times to keep one, written only as often as one of them can be kept.

In the first call of a clipped step of a ResNet18 (two cores of an AMD EPYC, torch 2.13) writing them took 4.3 s, and
takes 3.3 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch._inductor import config

from psg_fx.torch_private.patching import patched_here


@contextlib.contextmanager
def written_once() -> Iterator[None]:
    """While open, this thread compiles so."""
    with _no_code_for_no_rest(), _kept_if_not_merged():
        yield


@contextlib.contextmanager
def _no_code_for_no_rest() -> Iterator[None]:
    """A loop in vectors has a rest, whose code is a vectorized kernel, too, written even where sizes leave none.  It is
    the scalar kernel then, which is there before all others.
    """
    from torch._inductor.codegen import cpp  # slow to import, and only who compiles needs it

    write: Any = cpp.CppKernelProxy.codegen_functions
    tile: Any = cpp.TilingSelect.select_tiling

    def written(self: Any, bodies: Sequence[Any], sizes: Sequence[Any]) -> None:
        with config.patch({"cpp.enable_loop_tail_vec": config.cpp.enable_loop_tail_vec}):
            write(self, bodies, sizes)

    def tiled(self: Any, bodies: Sequence[Any], sizes: Sequence[Any]) -> Any:
        found = tile(self, bodies, sizes)
        factors, places = found[:2]
        outer, reduced = max(sizes, key=lambda of: len(of[1]))
        loops = (*outer, *reduced)
        if all(loops[place] % factor == 0 for factor, place in zip(factors, places, strict=True)):
            config.cpp.enable_loop_tail_vec = False
        return found

    with (
        patched_here(cpp.CppKernelProxy, "codegen_functions", written),
        patched_here(cpp.TilingSelect, "select_tiling", tiled),
    ):
        yield


@contextlib.contextmanager
def _kept_if_not_merged() -> Iterator[None]:
    """Kernels whose outer loops could be one are written, and again where their loops turn out to differ.  The second
    time they are the same, if the first found no buffers that are local to what would have been merged.
    """
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    fits: Any = cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
    write: Any = cpp.CppKernelProxy.codegen_nodes
    kept: dict[tuple[str, ...], Any] = {}

    def fitting(self: Any, kernels: Sequence[Any], depth: int) -> bool:
        found: bool = fits(self, kernels, depth)
        if not found and not V.local_buffer_context.local_buffers:
            kept.update(zip((_names(of.get_nodes()) for of in self.get_outer_nodes()), kernels, strict=True))
        return found

    def written(self: Any, nodes: Sequence[Any]) -> None:
        first = kept.pop(_names(nodes), None)
        if first is None or first.kernel_group is not self.kernel_group:
            write(self, nodes)
        else:
            vars(self).update(vars(first))

    with (
        patched_here(cpp.OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", fitting),
        patched_here(cpp.CppKernelProxy, "codegen_nodes", written),
    ):
        yield


def _names(nodes: Sequence[Any]) -> tuple[str, ...]:
    return tuple(node.get_name() for node in nodes)
