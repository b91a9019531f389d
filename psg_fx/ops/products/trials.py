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
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from psg_fx.digests import digest
from psg_fx.machine import cpu_model
from psg_fx.torch_private import caches
from psg_fx.torch_private.thread_counts import with_one_thread

Multiply = Callable[[Tensor, Tensor], Tensor]

_CLEARLY = 1.2
"""How many times as fast it must be: no two ways that are alike change places by chance."""

_ALONE = 0.9
"""How much of its threads' time a trial must have been given for its answer to hold for later processes."""


def is_faster(name: str, multiply: Multiply, rows: int, rounds: int, threads: int, code: str = "") -> bool:
    """Whether it multiplies [rows, 512] by [512, 512] clearly faster than the BLAS.

    threads: one, or all that are set.  code: what multiplies, where that is psg_fx's own.
    """
    return times_as_fast(name, multiply, rows, rounds, threads, code) >= _CLEARLY


@functools.cache
def times_as_fast(name: str, multiply: Multiply, rows: int, rounds: int, threads: int, code: str = "") -> float:
    """The BLAS's time in the other's: kept on disk, or tried now."""
    path = _kept(name, threads, code)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return float(path.read_text(encoding="utf-8"))
    found, given = _tried(multiply, rows, rounds, threads)
    if path is not None and given >= _ALONE:
        with contextlib.suppress(OSError):
            caches.write_whole(path, f"{found:.3f}\n".encode())
    return found


def _kept(name: str, threads: int, code: str) -> Path | None:
    """Where the answer lies for a machine like this, and code like this; None where torch keeps nothing."""
    folder, capability = caches.folder(), torch.backends.cpu.get_cpu_capability()
    machine = digest(repr((torch.__version__, cpu_model(), os.cpu_count(), capability, threads, code)))
    return None if folder is None else folder / "psg_fx" / "trials" / f"{name}-{machine}"


def _tried(multiply: Multiply, rows: int, rounds: int, threads: int) -> tuple[float, float]:
    """The median of pairs, one right after the other, the first of which is nobody's; and how much of its threads' time
    this process was given meanwhile.
    """
    # Random numbers would be taken from the user's generator; defaults are the user's, too.
    a, b = (torch.ones(n, 512, dtype=torch.float32, device="cpu") for n in (rows, 512))

    def measure() -> tuple[float, float]:
        began = time.process_time(), time.perf_counter()
        pairs = [(_seconds(torch.mm, a, b), _seconds(multiply, a, b)) for _ in range(1 + rounds)]
        worked, passed = time.process_time() - began[0], time.perf_counter() - began[1]
        return statistics.median(usual / other for usual, other in pairs[1:]), worked / (threads * passed)

    return with_one_thread(measure) if threads == 1 else measure()


def _seconds(multiply: Multiply, a: Tensor, b: Tensor) -> float:
    began = time.perf_counter()
    multiply(a, b)
    return time.perf_counter() - began
