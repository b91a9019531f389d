"""Where inductor's loops in tiles write what they scatter.

A loop over tiles of two dims adds the place within the tile to an index twice, where several threads add to what others
add to: `CppTile2DKernel.store` adds it, and so does `index_expr`, which it is written by then (torch 2.13 and before).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from psg_fx.torch_private.patching import patched_here


@contextlib.contextmanager
def scattered_in_place() -> Iterator[None]:
    """While open, loops that this thread has inductor write add the place within a tile once."""
    from torch._inductor import config
    from torch._inductor.codegen import cpp  # slow to import, and only who compiles needs it

    tiled, overrides = getattr(cpp, "CppTile2DKernel", None), getattr(cpp, "CppTile2DOverrides", None)
    if tiled is None or not all(hasattr(tiled, name) for name in ("transform_indexing", "need_vec_transpose")):
        yield
        return
    if "index_expr" not in vars(overrides):
        yield
        return
    original = tiled.store

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        by_index_expr = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if by_index_expr and not self.need_vec_transpose(self.rename_indexing(index)):
            return cpp.CppVecKernel.store(self, name, index, value, mode)
        return original(self, name, index, value, mode)

    with patched_here(tiled, "store", store):
        yield
