"""C++ kernels of one graph in few files: inductor gives each a file of its own.

Of the time that g++ takes for such a file, most is the same for every file: reading headers (precompiled ones, too),
and linking.  Kernels that follow one another in a file, each in a namespace of its own, pay that once.  What is called
from Python is as inductor writes it, a module for each kernel; a library can hold many.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CodeCacheFuture, CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import clear_on_fresh_cache

from .patching import patched_here

LEAST = 16_384
"""Characters of code that are worth a file of their own: as long as g++ takes for no code at all."""

_PLAIN = re.compile(r'\s*(#include <[^>]+>)\n\s*extern "C"\s+(void\s+kernel\()')
"""How the code of a kernel begins that stands for itself."""
_OF_ALL = re.compile(r"^\s*#(include|define|undef)\b|\bextern \"C\"", re.MULTILINE)
"""What means something outside of a namespace."""
_PREAMBLE = re.compile(r"(\s*(//|#)[^\n]*\n|\s*\n)*")
"""What must stand outside of a namespace: headers and macros, and comments among them."""


@contextlib.contextmanager
def few_kernel_files() -> Iterator[None]:
    """While open, the kernels of each graph that this thread has inductor load are compiled in few files."""
    alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def later(self: Any, argtypes: list[str], source: str) -> Any:
        """The kernel once all are known, as `wait` asks for it."""
        parts = _parts(source)
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
                self._found = [_now(kernel.alone()) for kernel in self._kernels]
        return self._found


def _now(kernel: Any) -> Any:
    return kernel.result() if isinstance(kernel, CodeCacheFuture) else kernel


def _compiled(kernels: Sequence[_Kernel]) -> list[Callable[..., None]]:
    """The kernels as functions of Python."""
    found: dict[int, Callable[..., None]] = {}
    files = _files(kernels, get_compile_threads())
    with _submitting() as submit:
        pending = [_Library.load_async(_code([kernels[i] for i in file]), "cpu", submit_fn=submit) for file in files]
    for file, get in zip(files, pending, strict=True):
        library = get()
        found |= {i: _function(library, place) for place, i in enumerate(file)}
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
        lengths = [0] * len(files)
        for i in sorted(own, key=lambda i: (-len(kernels[i].code), kernels[i].code)):
            shortest = lengths.index(min(lengths))
            files[shortest].append(i)
            lengths[shortest] += len(kernels[i].code)
        found += files
    return found


def _code(kernels: Sequence[_Kernel]) -> str:
    """One file: each kernel in a namespace of its own, and behind them what inductor binds them to Python by."""
    bindings = [_PREAMBLE.match(_binding(kernel, f"kernel_{i}")) for i, kernel in enumerate(kernels)]
    found = [(binding.group(), binding.string[binding.end() :]) for binding in bindings if binding is not None]
    parts = [kernels[0].header]
    parts += [_within(i, kernel.code) for i, kernel in enumerate(kernels)]
    parts += [found[0][0]]
    parts += [_within(i, binding) for i, (_, binding) in enumerate(found)]
    return "\n" + "\n".join(parts)


def _within(place: int, code: str) -> str:
    return f"namespace of_kernel_{place} {{\n{code}}}\n"


def _binding(kernel: _Kernel, name: str) -> str:
    """What makes a module of this name, with a function of this name."""
    parsed = (f"parse_arg<{t.replace('const ', '')}>(args, {n})" for n, t in enumerate(kernel.argtypes))
    return CppPythonBindingsCodeCache.suffix_template.format(
        arg_len=len(kernel.argtypes), entry_func=name, extra_parse_arg="",
        call_entry_func=CppPythonBindingsCodeCache.call_entry_function.format(", ".join(parsed)),
    )  # fmt: skip


@clear_on_fresh_cache
class _Library(CppPythonBindingsCodeCache):
    """A file of several kernels, compiled."""

    cache: dict[str, Callable[[], Any]] = {}  # noqa: RUF012 (as in the class that it is like)

    @staticmethod
    def cache_clear() -> None:
        _Library.cache.clear()

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return SimpleNamespace(path=path, key=key)


def _function(library: Any, place: int) -> Callable[..., None]:
    name = f"kernel_{place}"
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    spec = importlib.util.spec_from_file_location(f"{library.key}.{name}", library.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., None] = getattr(module, name)
    return found
