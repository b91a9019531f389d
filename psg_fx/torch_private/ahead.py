"""What inductor asks of a machine before its first C++ kernel, asked in another thread while a model is captured.

Which vector instructions work is tried by small programs, in processes of their own, and headers are preprocessed to
see whether those that were compiled still serve.  That is more than a second where all is as it was, and fifteen where
there is nothing yet, in which Python does nothing but wait.  Torch keeps the answers for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache

_KERNEL = "// at::vec::\n"
"""Compiled with the flags of vector instructions, as kernels are; if it were compiled."""


@functools.cache
def ask_ahead() -> threading.Thread:
    """Begin to ask, once; who needs the answers joins the thread."""
    thread = threading.Thread(target=_ask, name="psg_fx asks for the compiler", daemon=True)
    thread.start()
    return thread


def _ask() -> None:
    with contextlib.suppress(Exception):  # torch asks again, where it is needed, and says what is wrong
        cpu_vec_isa.pick_vec_isa()
        CppPythonBindingsCodeCache.load_async(_KERNEL, "cpu", submit_fn=_never)


def _never(compile_it: Callable[[], Any]) -> Future[Any]:
    """In the place of what compiles a file once its headers are ready."""
    return Future()
