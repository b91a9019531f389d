"""`psg_fx::by_onednn`: a product of two matrices of float32 on a CPU by oneDNN, where that is faster than the BLAS.

torch's BLAS on x86-64, MKL, keeps to AVX2 on processors of others than Intel.  One that computes with whole vectors of
AVX-512 (AMD's Zen 5) multiplies twice as fast by oneDNN, one that does not has nothing to gain.  Nothing is concluded
from names: each multiplies a few times, at the first compilation.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from psg_fx.ops.products.matrix_product import define_product
from psg_fx.torch_private import onednn

CLEARLY = 1.2
"""How many times as fast it must be: no two libraries that are alike change places by chance."""

_ROUNDS = 12
"""Of which the shortest counts: compilers may run beside it."""


def is_faster() -> bool:
    """Whether oneDNN multiplies clearly faster than the BLAS."""
    return onednn.has_onednn() and times_as_fast() >= CLEARLY


@functools.cache
def times_as_fast() -> float:
    """The BLAS's time in oneDNN's, each the shortest of some for a product of middle size: 10 to 25 ms in all, once.

    With one thread: it tells how wide vectors are as well as several do, which wait for each other where compilers run
    beside them, so that one library or the other would win by chance.
    """
    # Random ones would be taken from the user's generator; defaults are the user's, too.
    a, b = (torch.ones(rows, 512, dtype=torch.float32, device="cpu") for rows in (128, 512))
    found: dict[Callable[..., Tensor], list[float]] = {torch.mm: [], onednn.product: []}
    with _one_thread():
        for _ in range(1 + _ROUNDS):
            for way, seconds in found.items():
                seconds.append(_seconds(way, a, b))
    return min(found[torch.mm]) / min(found[onednn.product])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    began = time.perf_counter()
    multiply(a, b)
    return time.perf_counter() - began


by_onednn = define_product("by_onednn", onednn.product)
"""a[m, k] b[k, n] + bias[n]."""
