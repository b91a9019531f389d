"""Libraries in C++, compiled as inductor compiles its kernels: by its compiler, with its flags, into its folder.

`CppCodeCache` is private; torch has no public way to compile a file that needs neither Python's headers nor torch's.
"""

from __future__ import annotations

import functools
import importlib.resources
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import CDLL

from torch._inductor.codecache import CppCodeCache

from psg_fx.torch_private.ahead import ask_ahead


@functools.cache
def compiling(name: str) -> Future[CDLL | None]:
    """The library of a file in `psg_fx/ops`, which a thread compiles, once; None where it does not compile."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=f"psg_fx compiles {name}")
    found = thread.submit(_compiled, name)
    thread.shutdown(wait=False)
    return found


def _compiled(name: str) -> CDLL | None:
    source = (importlib.resources.files("psg_fx.ops") / f"{name}.cpp").read_text(encoding="utf-8")
    ask_ahead().join()  # which vector instructions there are
    try:
        library: CDLL = CppCodeCache.load(source)
        return library
    except Exception:  # no compiler, or one that does not know vectors: the step says so, or torch's ops do
        return None
