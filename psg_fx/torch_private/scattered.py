"""Where inductor's code adds what it scatters, what, and when.

In C++ (torch 2.13 and before): a loop over tiles of two dims adds the place within the tile to an index twice, where
several threads add to what others add to.  `CppTile2DKernel.store` adds it, and so does `index_expr`, which it is
written by then.

In Triton: what is added to a tensor of one element has the same address in every lane.  Up to torch 2.11 lanes beyond
the last element add, too, since a constant index has no mask; in torch 2.13 those of a reduction still do, and a value
that is alike everywhere (ones that are counted) is added once in a kernel of two dims, not once for each element.

For a CPU, loops may be written anew so that they fuse.  Then (before torch 2.15) a loop that reads a value forgets that
another one adds to it first, and the order in which memory is needed may put it before: gradients that pass a
`max_pool2d` or an `interpolate` were zero (https://github.com/pytorch/pytorch/pull/185873).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._ordered_set import OrderedSet

from psg_fx.torch_private.patching import patched_here


@contextlib.contextmanager
def scattered_in_place() -> Iterator[None]:
    """While open, loops that this thread has inductor write add each element once, where it belongs, and before it is
    read.
    """
    with _tiles_in_cpp(), _one_place_in_triton(), _before_it_is_read():
        yield


@contextlib.contextmanager
def _tiles_in_cpp() -> Iterator[None]:
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


@contextlib.contextmanager
def _before_it_is_read() -> Iterator[None]:
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    original: Any = SchedulerNode.recompute_size_and_body

    def recompute(self: Any, *args: Any, **kwargs: Any) -> None:
        ordering = OrderedSet(dep for dep in self.read_writes.reads if isinstance(dep, (WeakDep, StarDep)))
        original(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(ordering).rename(self.mutation_renames))

    with patched_here(SchedulerNode, "recompute_size_and_body", recompute):
        yield


@contextlib.contextmanager
def _one_place_in_triton() -> Iterator[None]:
    from torch._inductor.codegen import triton

    kernel: Any = getattr(triton, "TritonKernel", None)
    constant = getattr(triton, "is_sympy_integer_like", None)
    if constant is None or not all(hasattr(kernel, name) for name in ("active_range_trees", "_has_constant_mask")):
        yield
        return
    original = kernel.store

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        if mode != "atomic_add" or not constant(index):
            return original(self, name, index, value, mode)
        sizes, generate = self.dense_size_list(), self.cse.generate
        each = generate(
            self.compute, f"tl.broadcast_to({value}, [{', '.join(sizes)}])", dtype=value.dtype, shape=tuple(sizes)
        )
        self.indexing = _masked(self, self.indexing)
        try:
            return original(self, name, index, each, mode)
        finally:
            del self.indexing

    with patched_here(kernel, "store", store):
        yield


def _masked(kernel: Any, indexing: Callable[..., Any]) -> Callable[..., Any]:
    """Like `indexing`, with the masks of all dims that the kernel is in."""
    trees = [tree for tree in kernel.active_range_trees() if not kernel._has_constant_mask(tree)]

    def found(*args: Any, **kwargs: Any) -> Any:
        options = indexing(*args, **kwargs)
        options.mask_vars.update(f"{tree.prefix}mask" for tree in trees)
        return options

    return found
