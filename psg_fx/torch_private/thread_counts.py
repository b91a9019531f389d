"""Computing with one thread while the process keeps its number.

`torch.set_num_threads` sets what OpenMP and MKL keep for the thread that calls it, and what every thread begins with
that uses torch for the first time, also one of the user's.  Here the first is set alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

_Made = TypeVar("_Made")
_SETTERS = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"


def with_one_thread(task: Callable[[], _Made]) -> _Made:
    """What the task makes in a thread of its own, where torch's products take no other; as many as are set where torch
    is built with something else than OpenMP.
    """
    if torch.get_num_threads() == 1:
        return task()
    with ThreadPoolExecutor(1, "psg_fx with one thread", initializer=_one_here) as pool:
        return pool.submit(task).result()


def _one_here() -> None:
    torch.get_num_threads()  # the first use, at which torch sets its own number
    for setter in _setters():
        setter(ctypes.c_int(1))


@functools.cache
def _setters() -> list[Callable[[ctypes.c_int], object]]:
    """Those of the libraries that torch multiplies with, as far as it has them."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        library = next(ctypes.CDLL(str(path)) for path in sorted(folder.glob("*torch_cpu.*")) if path.suffix != ".lib")
    except (OSError, StopIteration):
        return []
    return [getattr(library, name) for name in _SETTERS if hasattr(library, name)]
