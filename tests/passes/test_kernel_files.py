"""Kernels that share a file compute what they compute alone."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError

from psg_fx.torch_private import ahead, kernel_files, native
from psg_fx.torch_private.kernel_files import few_kernel_files

pytestmark = pytest.mark.inductor


def function(size: int) -> tuple[Callable[[Tensor], Any], Tensor]:
    """What inductor makes several kernels of; another function for each size."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.softmax(-1) @ x).sin().sum(0)
        return y, (x.exp() @ y).cumsum(0)

    return f, torch.rand(size, size)


def test_what_is_asked_ahead_is_what_kernels_ask() -> None:
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    codecache._precompile_header.cache_clear()
    codecache.CppPythonBindingsCodeCache.cache_clear()
    ahead.ask_ahead.cache_clear()
    ahead.ask_ahead().join()
    asked = cpu_vec_isa.valid_vec_isa_list.cache_info().misses, codecache._precompile_header.cache_info().misses
    assert asked == (1, 1)
    compiled(4)
    after = cpu_vec_isa.valid_vec_isa_list.cache_info().misses, codecache._precompile_header.cache_info().misses
    assert after == asked
    assert codecache._precompile_header.cache_info().hits


def test_a_transposition_is_as_much_work_as_the_code_it_unrolls_to() -> None:
    transposed = "z" * 4_000 + "transpose_mxn<float,16,16>(" * 2
    kernels = [kernel_files._Kernel("", code, [], lambda: None) for code in ("x" * 12_000, "y" * 11_000, transposed)]
    assert kernel_files._files(kernels, 2) == [[2], [0, 1]]  # by length: [[0], [1, 2]]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Which kernels shared a file, of all that is compiled."""
    found: list[list[int]] = []
    shared = kernel_files._files

    def noted(kernels: Sequence[Any], threads: int) -> list[list[int]]:
        found.extend(shared(kernels, threads))
        return shared(kernels, threads)

    monkeypatch.setattr(kernel_files, "_files", noted)
    return found


def compiled(size: int) -> None:
    """Compile the function, and hold it against what it computes as it is."""
    torch._dynamo.reset()
    f, x = function(size)
    with few_kernel_files():
        found = torch.compile(f, fullgraph=True)(x)
    for one, other in zip(found, f(x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_files_as_threads(threads: int, files: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "LEAST", 1)
    with config.patch(compile_threads=threads):
        compiled(5 + threads)
    together = sorted(i for file in files for i in file)
    assert together == list(range(len(together)))
    assert len(files) == min(threads, len(together))
    assert len(together) > 1


def test_short_files_are_not_worth_it(files: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_files, "LEAST", 10**6)
    with config.patch(compile_threads=3):
        compiled(9)
    assert len(files) == 1


def test_an_error_is_that_of_a_kernel_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernels: Sequence[Any]) -> list[Any]:
        raise CppCompileError(["g++"], "no")

    monkeypatch.setattr(kernel_files, "_compiled", fail)
    compiled(10)


@pytest.mark.parametrize(
    "code",
    [
        '\n#include <a.h>\n#include <b.h>\nextern "C"  void  kernel(float* x)\n{\n}\n',
        '\n#include <a.h>\nextern "C"  void  kernel(float* x)\n{\n}\nextern "C" void other() {}\n',
        '\n#include <a.h>\nextern "C"  void  kernel(float* x)\n{\n#define N 3\n}\n',
        "\n#include <a.h>\ntemplate <typename T> void kernel(T* x) {}\n",
    ],
)
def test_other_code_has_a_file_of_its_own(code: str) -> None:
    assert kernel_files._parts(code) is None


def test_the_code_of_a_kernel() -> None:
    code = '\n#include <a.h>\nextern "C"  void  kernel(float* x)\n{\n    #pragma omp for\n}\n'
    assert kernel_files._parts(code) == ("#include <a.h>", "void  kernel(float* x)\n{\n    #pragma omp for\n}\n")


KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* x, float* y, const TYPE k)
{
    TORCH_CHECK(k < 7, "too many");
    y[0] = x[0] + k;
}
"""


def made(argtype: str) -> Any:
    """The kernel as a graph's code asks for it."""
    compiling = AsyncCompile()
    with few_kernel_files():
        source = KERNEL.replace("TYPE", argtype)
        scope = {"kernel": compiling.cpp_pybinding(["const float*", "float*", f"const {argtype}"], source)}
        compiling.wait(scope)
    return scope["kernel"]


@pytest.mark.parametrize("argtype", ["int64_t", "float"])  # the second is called as inductor does
def test_calls(argtype: str) -> None:
    kernel, x, y = made(argtype), torch.rand(1), torch.zeros(1)
    kernel(x, y, 2)
    torch.testing.assert_close(y, x + 2)
    with pytest.raises(RuntimeError, match="too many"):
        kernel(x, y, 9)
    for wrong in ((x, y), (x, 2, 3), (x, y, "2")):
        with pytest.raises((RuntimeError, TypeError)):
            kernel(*wrong)
    torch.testing.assert_close(y, x + 2)


@pytest.mark.skipif(sys.platform != "linux", reason="another linker")
def test_what_throws_is_linked_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes three times as long, and it has exceptions of its own.  Headers are those of all kernels."""
    source = KERNEL.replace("TYPE", "int64_t").replace(
        "TORCH_CHECK",
        "std::exception_ptr e; try { throw 1; } catch (...) { e = std::current_exception(); } TORCH_CHECK",
    )
    paths = list[str]()
    load = kernel_files._Library._load_library_inner
    monkeypatch.setattr(
        kernel_files._Library, "_load_library_inner", lambda path, key: paths.append(path) or load(path, key)
    )
    compiled(12)
    headers = codecache._precompile_header.cache_info().misses
    compiling = AsyncCompile()
    with few_kernel_files():
        scope = {"kernel": compiling.cpp_pybinding(["const float*", "float*", "const int64_t"], source)}
        compiling.wait(scope)
    assert b"libtorch_cpu" not in Path(paths[-1]).read_bytes()
    assert codecache._precompile_header.cache_info().misses == headers


def test_sizes_below_zero_and_large() -> None:
    kernel, x, y = made("int64_t"), torch.zeros(1), torch.zeros(1)
    for k in (-1, -(2**40)):
        kernel(x, y, k)
        assert y.item() == k


def test_where_what_calls_them_does_not_compile(files: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "finished", lambda name: None)
    compiled(11)
    assert files


def test_a_kernel_lets_go_of_what_it_was_made_of() -> None:
    kernel = made("int64_t")
    held = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert held() is None


def test_outside_nothing_is_changed() -> None:
    before = vars(AsyncCompile)["cpp_pybinding"], vars(AsyncCompile)["wait"]
    with few_kernel_files():
        assert vars(AsyncCompile)["cpp_pybinding"] is not before[0]
    assert (vars(AsyncCompile)["cpp_pybinding"], vars(AsyncCompile)["wait"]) == before
