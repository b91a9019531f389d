"""Libraries in C++, compiled as inductor compiles its kernels: by its compiler, with its flags, into its folder.

`CppCodeCache` is private; torch has no public way to compile a file that needs neither Python's headers nor torch's.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import logging
import os
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import CDLL
from typing import Any

import torch
from torch._inductor.codecache import CppCodeCache

from psg_fx.errors import first_line
from psg_fx.torch_private.ahead import ask_ahead

_log = logging.getLogger("psg_fx")

_BEGUN: dict[str, Future[CDLL | None]] = {}
_BEGINNING = threading.Lock()
_TURNS = threading.Semaphore(max(1, (os.cpu_count() or 1) - 1))
"""A compiler has one; a core is left to inductor, which works meanwhile."""

_INCLUDE = re.compile(r'^#include "(.*)"$', re.MULTILINE)
"""Files beside a file are put into it: what is compiled lies in inductor's folder."""


def begin(name: str) -> None:
    """Compile the file of that name in `psg_fx/ops/cpp`, in a thread, once in a process."""
    with _BEGINNING:
        if name not in _BEGUN:
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"psg_fx compiles {name}")
            _BEGUN[name] = thread.submit(_compiled, name)
            thread.shutdown(wait=False)


def finish() -> None:
    """Wait for all that has begun, so that a compiled step does not change from one call to the next."""
    for future in list(_BEGUN.values()):
        future.result()


def library(name: str) -> CDLL | None:
    """What has been compiled of it; None until then, and where it does not compile."""
    future = _BEGUN.get(name)
    return future.result() if future is not None and future.done() else None


def finished(name: str) -> CDLL | None:
    """The library, waited for; None where it does not compile."""
    begin(name)
    return _BEGUN[name].result()


def passed(value: torch.Tensor | str | int | None) -> Any:
    """An argument of a function of a library: where the first element of a contiguous tensor lies, or none."""
    if isinstance(value, str):
        return ctypes.c_char_p(value.encode())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


def threads() -> ctypes.c_int:
    """How many a function of a library may have, its last argument."""
    return ctypes.c_int(torch.get_num_threads())


def source(name: str) -> str:
    """The code of a library, with all that it includes."""
    return _text(f"{name}.cpp", set())


def _text(file: str, seen: set[str]) -> str:
    """The file with those that it includes, each where it is first wanted."""
    if file in seen:
        return ""
    seen.add(file)
    text = (importlib.resources.files("psg_fx.ops") / "cpp" / file).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda line: _text(line[1], seen), text)


def _compiled(name: str) -> CDLL | None:
    ask_ahead().join()  # which vector instructions there are
    try:
        with _TURNS:
            found: CDLL = CppCodeCache.load(source(name))
    except Exception as error:  # no compiler, or one that does not know vectors: torch's ops do the same
        _log.warning("%s.cpp cannot be compiled, and torch's ops take its place: %s", name, first_line(error))
        return None
    return found
