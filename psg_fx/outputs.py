"""Memory of large values on a CPU: huge pages, and blocks that live from call to call (docs/design/outputs.md)."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from psg_fx.errors import BadArgument
from psg_fx.torch_private import allocating, empty_strided_cpu

LARGE = 32 << 20
"""Bytes from which a value is looked after; the C library itself keeps smaller pieces of memory for the next call."""

_SPARE = 4
"""A block is taken for another value if it is at most so many times too large."""

_CALLS = 16
"""A block that served no value in so many calls is given back."""

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
"""Linux: fewer and larger pages, so fewer faults at the first touch."""


class Block:
    """Memory that serves the next value once no tensor lies in it."""

    def __init__(self, size: int) -> None:
        # Room for a somewhat larger batch: pages that are never touched take no memory.
        self.size = size + size // 4
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.memory = mmap.mmap(-1, self.size, **private)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        _ask_for_huge_pages(self.address, self.size)
        self.last_call = 0
        self._free = sys.getrefcount(self.memory)

    def is_free(self) -> bool:
        """Whether no tensor lies in it: every storage over the memory holds a reference to it."""
        return sys.getrefcount(self.memory) == self._free

    def serves(self, size: int) -> bool:
        """Whether a value of `size` bytes may lie here."""
        return size <= self.size and self.is_free()

    def tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor at the start of the block."""
        storage = torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Counts as free although tensors lie in it."""
        kept, self._free = self._free, sys.getrefcount(self.memory)
        try:
            yield
        finally:
            self._free = kept


class Memory:
    """Where the large values of a step lie.  keep: blocks are used again once nobody holds what lies in them."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._blocks: list[Block] = []
        self._calls = 0
        self._lock = threading.Lock()

    @contextmanager
    def serving(self, order: list[Block]) -> Iterator[None]:
        """While open, this memory serves the compiled graph that runs in this thread.

        order: the blocks that served the graph's last call, one value after the other; values return to their blocks.
        """
        before, order[:] = list(order), []
        self._calls += 1
        self._blocks = [block for block in self._blocks if self._calls - block.last_call <= _CALLS]

        def take(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            count = math.prod(size) * dtype.itemsize
            if count < LARGE:
                return empty_strided_cpu(size, stride, dtype)
            if not self.keep:
                value = empty_strided_cpu(size, stride, dtype)
                _ask_for_huge_pages(value.data_ptr(), count)
                return value
            with self._lock:
                order.append(self._block(count, before[len(order) :][:1]))
                return order[-1].tensor(size, stride, dtype)

        with allocating(take):
            yield

    def lent(self, tensors: Iterable[torch.Tensor]) -> ExitStack:
        """A context in which the memory of these tensors counts as free."""
        starts = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        contexts = ExitStack()
        for block in self._blocks:
            if block.address in starts:
                contexts.enter_context(block.lent())
        return contexts

    def _block(self, count: int, wanted: list[Block]) -> Block:
        """The block wanted if it will do, else the smallest that does, else a new one."""
        found = [b for b in wanted if b in self._blocks and b.serves(count)]
        others = (b for b in self._blocks if b.size <= _SPARE * count and b.serves(count))
        found = found or sorted(others, key=lambda b: b.size)
        if not found:
            found = [Block(count)]
            self._blocks += found
        found[0].last_call = self._calls
        return found[0]


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Advice to the kernel about the whole pages in this memory; what it does not know it ignores."""
    if _HUGE is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), ctypes.c_int(_HUGE))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def write_into(former: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Put the values of `fields` into the tensors of `former`; where a shape has changed, in their place."""
    values = dict(fields)
    if pytree.tree_structure(former) != pytree.tree_structure(values):
        raise BadArgument(
            f"out has the fields {', '.join(former)}", where="step(inputs, targets, out=...)",
            why=f"this call fills {', '.join(fields)}, for the parameters that are tracked now",
            fix="pass an output of the same step",
        )  # fmt: skip
    targets = pytree.tree_leaves(former)
    starts = {target.untyped_storage().data_ptr() for target in targets}

    def placed(target: torch.Tensor, value: torch.Tensor) -> bool:
        return target.data_ptr() == value.data_ptr() or target.shape != value.shape

    def moved(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The value, out of the way of what will be written."""
        inside = value.untyped_storage().data_ptr() in starts
        return value.clone() if inside and not placed(target, value) else value

    def written(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value if placed(target, value) else target.copy_(value)

    former.update(pytree.tree_map(written, former, pytree.tree_map(moved, former, values)))
