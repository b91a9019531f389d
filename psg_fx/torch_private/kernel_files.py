"""C++ kernels of one graph in few files: inductor gives each a file of its own.

Of the time that g++ takes for such a file, most is the same for every file: reading headers (precompiled ones, too),
and linking.  Kernels that follow one another in a file, each in a namespace of its own, pay that once.  Inductor writes
a module of Python behind every kernel, for which g++ reads Python's headers again; here one library calls them all
(`psg_fx/ops/cpp/kernel_calls.cpp`), which a machine compiles once.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CodeCacheFuture, CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import clear_on_fresh_cache

from psg_fx.garbage import collect_while_waiting
from psg_fx.torch_private import native
from psg_fx.torch_private.linking import LINKED, headers_of_all
from psg_fx.torch_private.patching import patched_here

CALLS = "kernel_calls"
"""The library that calls kernels from Python."""

LEAST = 16_384
"""Characters of code that are worth a file of their own: as long as g++ takes for no code at all."""

_EACH = 3_000
"""Characters of code that take as long as what each kernel adds by itself."""

_TRANSPOSE = 10_000
"""Characters that take as long as a transposition in registers, which is unrolled."""
_TRANSPOSES = re.compile(r"\btranspose_mxn<[^(]*\(")

_STARTING = 0.01
"""Seconds in which threads start their compilers, before something keeps Python busy."""

_PLAIN = re.compile(r'\s*(#include <[^>]+>)\n\s*extern "C"\s+(void\s+kernel\()')
"""How the code of a kernel begins that stands for itself."""
_OF_ALL = re.compile(r"^\s*#(include|define|undef)\b|\bextern \"C\"", re.MULTILINE)
"""What means something outside of a namespace."""
_WHOLE = "int64_t"
"""The type of arguments that are numbers; of all others, tensors' data is passed."""


def begin_calls() -> None:
    """Begin to compile what calls kernels, and to ask what compiling needs to know: passes come first, and leave a core
    idle.
    """
    native.begin(CALLS)


@contextlib.contextmanager
def few_kernel_files() -> Iterator[None]:
    """While open, the kernels of each graph that this thread has inductor load are compiled in few files."""
    alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def later(self: Any, argtypes: list[str], source: str) -> Any:
        """The kernel once all are known, as `wait` asks for it."""
        parts = _parts(source) if all(t.endswith("*") or _plain(t) == _WHOLE for t in argtypes) else None
        if parts is None:
            return alone(self, argtypes, source)
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source)
        kernels = self.__dict__.setdefault("_psg_fx_kernels", _Kernels())
        return kernels.add(_Kernel(*parts, argtypes, lambda: alone(self, argtypes, source)))

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        scope.update({name: value.result() for name, value in scope.items() if isinstance(value, _Promised)})
        wait(self, scope)

    with patched_here(AsyncCompile, "cpp_pybinding", later), patched_here(AsyncCompile, "wait", wait_for_all):
        yield


def _parts(source: str) -> tuple[str, str] | None:
    """What a kernel's code includes, and the rest, without `extern "C"`; None for code that is more than a function."""
    begin = _PLAIN.match(source)
    if begin is None or _OF_ALL.search(source, begin.end()):
        return None
    return begin[1], begin[2] + source[begin.end() :]


class _Promised(LambdaFuture):
    """A kernel that is not compiled yet."""


@dataclass(frozen=True)
class _Kernel:
    """header: what its code includes.  code: without that, and without `extern "C"`.  alone: compiles it by itself."""

    header: str
    code: str
    argtypes: Sequence[str]
    alone: Callable[[], Any]

    @property
    def work(self) -> int:
        """What g++ has to do for it, in characters of code: kernels of one file follow this to a tenth or so."""
        return len(self.code) + _EACH + _TRANSPOSE * len(set(_TRANSPOSES.findall(self.code)))


class _Kernels:
    """Those of one graph; compiled when the first of them is asked for."""

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []
        self._found: list[Any] | None = None

    def add(self, kernel: _Kernel) -> _Promised:
        index = len(self._kernels)
        self._kernels.append(kernel)
        return _Promised(lambda: self._all()[index])

    def _all(self) -> list[Any]:
        if self._found is None:
            try:
                self._found = _compiled(self._kernels)
            except CppCompileError:  # the error of a kernel by itself says more
                self._found = None
            if self._found is None:
                self._found = [_now(kernel.alone()) for kernel in self._kernels]
        return self._found


def _now(kernel: Any) -> Any:
    return kernel.result() if isinstance(kernel, CodeCacheFuture) else kernel


def _compiled(kernels: Sequence[_Kernel]) -> list[Callable[..., None]] | None:
    """The kernels as functions of Python; None where the library that calls them does not compile."""
    begin_calls()
    found: dict[int, Callable[..., None]] = {}
    files = _files(kernels, get_compile_threads())
    with _submitting() as submit, headers_of_all():
        codes = [_code([kernels[i] for i in file]) for file in files]
        pending = [_Library.load_async(code, "cpu", submit_fn=submit, extra_flags=LINKED) for code in codes]
    time.sleep(_STARTING)
    collect_while_waiting()
    calls = native.finished(CALLS)
    if calls is None:
        return None
    for file, get in zip(files, pending, strict=True):
        library = get()
        found |= {i: _function(calls, library[_name(place)], kernels[i]) for place, i in enumerate(file)}
    return [found[i] for i in range(len(kernels))]


@contextlib.contextmanager
def _submitting() -> Iterator[Callable[[Callable[[], Any]], Any] | None]:
    """Runs tasks in threads, from its end on; None where there are none.  A task takes a lock on a file that is held
    while it is submitted: one that comes too early looks again after 50 ms.
    """
    begin = threading.Event()
    try:
        yield (lambda task: AsyncCompile.submit(lambda: begin.wait() and task())) if get_compile_threads() > 1 else None
    finally:
        begin.set()


def _files(kernels: Sequence[_Kernel], threads: int) -> list[list[int]]:
    """Which kernels share a file: as many files as are compiled at once, unless they would be short; of one header."""
    found = []
    for header in dict.fromkeys(kernel.header for kernel in kernels):
        own = [i for i, kernel in enumerate(kernels) if kernel.header == header]
        length = sum(len(kernels[i].code) for i in own)
        files: list[list[int]] = [[] for _ in range(min(threads, length // LEAST + 1, len(own)))]
        work = [0] * len(files)
        for i in sorted(own, key=lambda i: (-kernels[i].work, kernels[i].code)):
            least = work.index(min(work))
            files[least].append(i)
            work[least] += kernels[i].work
        found += files
    return found


def _code(kernels: Sequence[_Kernel]) -> str:
    """One file: each kernel in a namespace of its own, and behind it a function of all its arguments in an array."""
    parts = [kernels[0].header]
    for place, kernel in enumerate(kernels):
        passed = ", ".join(_argument(n, argtype) for n, argtype in enumerate(kernel.argtypes))
        parts.append(f"namespace of_{_name(place)} {{\n{kernel.code}}}\n")
        parts.append(f'extern "C" void {_name(place)}(void* const* of) {{ of_{_name(place)}::kernel({passed}); }}\n')
    return "\n" + "\n".join(parts)


def _name(place: int) -> str:
    return f"kernel_{place}"


def _plain(argtype: str) -> str:
    return argtype.replace("const ", "").strip()


def _argument(place: int, argtype: str) -> str:
    """An element of the array as what the kernel wants: `load` in `kernel_calls.cpp` has written it."""
    cast = "reinterpret_cast" if _plain(argtype) == _WHOLE else "static_cast"
    return f"{cast}<{_plain(argtype)}>(of[{place}])"


@clear_on_fresh_cache
class _Library(CppPythonBindingsCodeCache):
    """A file of several kernels, compiled with the flags and precompiled headers of those that are compiled alone."""

    cache: dict[str, Callable[[], Any]] = {}  # noqa: RUF012 (as in the class that it is like)

    @staticmethod
    def cache_clear() -> None:
        _Library.cache.clear()

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return ctypes.CDLL(path)


def _function(calls: ctypes.CDLL, found: Any, kernel: _Kernel) -> Callable[..., None]:
    """A kernel of a library as a function of Python."""
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("function", calls))
    kinds = "".join("n" if _plain(argtype) == _WHOLE else "t" for argtype in kernel.argtypes)
    data = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    made: Callable[..., None] = make(ctypes.cast(found, ctypes.c_void_p), data, kinds.encode())
    return made
