"""Whether another way to multiply matrices of float32 is faster on this machine than the BLAS of torch.

Nothing is concluded from names: each multiplies a few times, before the first step that would gain by it is compiled.
The answer is kept where torch keeps what it compiles: a process that chose otherwise than the one before would compile
its kernels anew.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from psg_fx.digests import digest
from psg_fx.machine import cpu_model
from psg_fx.torch_private import caches

Multiply = Callable[[Tensor, Tensor], Tensor]

_CLEARLY = 1.2
"""How many times as fast it must be: no two ways that are alike change places by chance."""

_ALONE = 0.9
"""How much of its threads' time a trial must have been given for its answer to hold for later processes."""


def is_faster(name: str, multiply: Multiply, rows: int, rounds: int, threads: int) -> bool:
    """Whether it multiplies [rows, 512] by [512, 512] clearly faster than the BLAS, with so many threads."""
    return times_as_fast(name, multiply, rows, rounds, threads) >= _CLEARLY


@functools.cache
def times_as_fast(name: str, multiply: Multiply, rows: int, rounds: int, threads: int) -> float:
    """The BLAS's time in the other's: kept on disk, or tried now."""
    path = _kept(name, threads)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return float(path.read_text(encoding="utf-8"))
    found, given = _tried(multiply, rows, rounds, threads)
    if path is not None and given >= _ALONE:
        with contextlib.suppress(OSError):
            caches.write_whole(path, f"{found:.3f}\n".encode())
    return found


def _kept(name: str, threads: int) -> Path | None:
    """Where the answer lies for a machine like this; None where torch keeps nothing."""
    folder, capability = caches.folder(), torch.backends.cpu.get_cpu_capability()
    machine = digest(repr((torch.__version__, cpu_model(), os.cpu_count(), capability, threads)))
    return None if folder is None else folder / "psg_fx" / "trials" / f"{name}-{machine}"


def _tried(multiply: Multiply, rows: int, rounds: int, threads: int) -> tuple[float, float]:
    """The median of pairs, one right after the other, the first of which is nobody's; and how much of its threads' time
    this process was given meanwhile.
    """
    # Random numbers would be taken from the user's generator; defaults are the user's, too.
    a, b = (torch.ones(n, 512, dtype=torch.float32, device="cpu") for n in (rows, 512))
    with _threads(threads):
        began = time.process_time(), time.perf_counter()
        pairs = [(_seconds(torch.mm, a, b), _seconds(multiply, a, b)) for _ in range(1 + rounds)]
        worked, passed = time.process_time() - began[0], time.perf_counter() - began[1]
    return statistics.median(usual / other for usual, other in pairs[1:]), worked / (threads * passed)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(multiply: Multiply, a: Tensor, b: Tensor) -> float:
    began = time.perf_counter()
    multiply(a, b)
    return time.perf_counter() - began
