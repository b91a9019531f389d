"""Memory of large values on a CPU: blocks that live from call to call, and huge pages (docs/design/outputs.md)."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from psg_fx.torch_private.compiler import allocating, empty_strided_cpu

LARGE = 2 << 20
"""Bytes from which a value lies in a block, or at least on huge pages: of so many one may be whole."""

_MAPPED = 32 << 20
"""Bytes from which the C library takes memory from the kernel, and gives it back as soon as it is free.  Smaller values
lie in its heap, whose top it gives back, too, once that is larger than `_KEPT`.
"""

_KEPT = 512 << 20

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""

_ALLOCATOR_IS_SET = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")

_SPARE = 2
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
        self._lent: tuple[int, int] | None = None  # to a thread, with what it holds

    def is_free(self) -> bool:
        """Whether no tensor lies in it: every storage over the memory holds a reference to it."""
        held = sys.getrefcount(self.memory)
        return held == self._free or self._lent == (threading.get_ident(), held)

    def serves(self, size: int) -> bool:
        """Whether a value of `size` bytes may lie here."""
        return size <= self.size and self.is_free()

    def tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor at the start of the block."""
        storage = torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Counts as free for this thread although tensors lie in it."""
        self._lent = threading.get_ident(), sys.getrefcount(self.memory)
        try:
            yield
        finally:
            self._lent = None


@dataclass
class Places:
    """Where the large values of a compiled graph lie, by their numbers in the order of all allocations; the blocks
    belong to a `Memory`.  results: the numbers of those that outlive a call, known once there was one.
    """

    blocks: WeakValueDictionary[int, Block] = field(default_factory=WeakValueDictionary)
    results: frozenset[int] | None = None


class Memory:
    """Where the large values of a step lie.  keep: in blocks, used again once nobody holds what lies in them; but what
    the C library keeps for the next call, and serves from its caches, is left to it unless it is a result.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._blocks: list[Block] = []
        self._calls = 0
        self._lock = threading.Lock()

    def serving(self, places: Places) -> allocating:
        """A context in which this memory serves the compiled graph that runs in this thread.

        places: where the graph's values lay at its last call; they return there.
        """
        heap = _heap()
        if not self.keep:
            return allocating(_fresh)
        values = itertools.count()
        with self._lock:
            self._calls += 1
            self._blocks = [block for block in self._blocks if self._calls - block.last_call <= _CALLS]

        def take(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            value, count = next(values), math.prod(size) * dtype.itemsize
            if count < LARGE:
                return empty_strided_cpu(size, stride, dtype)
            if count < heap and places.results is not None and value not in places.results:
                return _fresh(size, stride, dtype)
            with self._lock:
                block = places.blocks[value] = self._block(count, places.blocks.get(value))
                for used in _watchers:
                    used[block.address] = max(count, used.get(block.address, 0))
                return block.tensor(size, stride, dtype)

        return allocating(take)

    def served(self, places: Places, results: Iterable[object]) -> None:
        """The results of the graph's call: after the first one that had large values, blocks of those that are no
        results are given back.
        """
        if not self.keep or places.results is not None or not places.blocks:
            return
        starts = {r.untyped_storage().data_ptr() for r in results if isinstance(r, torch.Tensor)}
        with self._lock:
            places.results = frozenset(n for n, block in places.blocks.items() if block.address in starts)
            others = [b for n, b in places.blocks.items() if n not in places.results and b.size < _heap()]
            self._blocks = [block for block in self._blocks if block not in others]

    def lent(self, tensors: Iterable[torch.Tensor]) -> ExitStack:
        """A context in which the memory of these tensors counts as free."""
        starts = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        contexts = ExitStack()
        with self._lock:
            blocks = [block for block in self._blocks if block.address in starts]
        for block in blocks:
            contexts.enter_context(block.lent())
        return contexts

    def _block(self, count: int, wanted: Block | None) -> Block:
        """The block wanted if it will do, else the smallest that does, else a new one."""
        found = wanted
        if found is None or not found.serves(count):
            others = (b for b in self._blocks if b.size <= _SPARE * count and b.serves(count))
            found = min(others, key=lambda b: b.size, default=None)
        if found is None:
            found = Block(count)
            self._blocks.append(found)
        found.last_call = self._calls
        return found


_watchers: list[dict[int, int]] = []


@contextmanager
def blocks_used() -> Iterator[dict[int, int]]:
    """While open: the bytes that values took in each block, by its address.  No allocator knows of them."""
    used: dict[int, int] = {}
    _watchers.append(used)
    try:
        yield used
    finally:
        _watchers.remove(used)


def _fresh(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small steps do little else than allocate: all that is asked of their values is the size."""
    value = empty_strided_cpu(size, stride, dtype)
    if (count := value.nbytes) >= LARGE:
        _ask_for_huge_pages(value.data_ptr(), count)
    return value


def _heap() -> int:
    """Bytes below which the C library keeps what is freed."""
    return _MAPPED if _settle_allocator() else 0


@functools.cache
def _settle_allocator() -> bool:
    """Let the C library keep what is freed for the next call: pieces below 32 MiB, and up to 512 MiB at the top of its
    heap; whether it does.  Glibc keeps little until pieces of 31 MiB have been freed, and 64 MiB from then on, so a
    step whose values are more than that pays for its pages at some calls and not at others, as whatever lies above them
    decides.  Whoever has set glibc's own variables is left alone, as are other allocators and other C libraries.
    """
    if any(name in os.environ for name in _ALLOCATOR_IS_SET) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if sys.platform != "linux" or not hasattr(_libc(), "gnu_get_libc_version"):
        return False
    return bool(_libc().mallopt(_M_MMAP_THRESHOLD, _MAPPED) and _libc().mallopt(_M_TRIM_THRESHOLD, _KEPT))


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Advice to the kernel about the whole pages in this memory; what it does not know it ignores."""
    if _HUGE is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), ctypes.c_int(_HUGE))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
