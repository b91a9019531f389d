"""Kernels written once are those that inductor writes several times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config, metrics
from torch._inductor.codegen import cpp
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.written_once import written_once


def norms(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outer loops of one length, which inductor tries to merge; inner ones of other depths."""
    return (a.square().sum((1, 2)) + b.square().sum(1)).sqrt(), b.mean(1)


def softmax(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outer loops that are merged, with a buffer that is local to them."""
    return (a + 1).softmax(-1), b * 2


def transposed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of two loops."""
    return a.transpose(1, 2).contiguous() + 1, b.T.contiguous() * 2


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many times the code of a loop nest is written, and how many kernels of vectors with it."""
    found = {"nests": 0, "kernels": 0}
    write = cpp.CppKernelProxy.codegen_functions

    def written(self: Any, *args: Any) -> None:
        found["nests"] += 1
        write(self, *args)
        found["kernels"] += len({kernel for kernel in self.kernels if isinstance(kernel, cpp.CppVecKernel)})

    with patched_here(cpp.CppKernelProxy, "codegen_functions", written):
        yield found


def compiled(function: Any, inputs: Any, context: Any) -> tuple[Any, dict[str, int]]:
    metrics.reset()
    gm = make_fx(function)(*inputs)
    with torch.no_grad(), config.patch(force_disable_caches=True), counted() as found, context():
        run = compile_fx(gm, list(inputs))
    return run(*inputs), found


@pytest.mark.parametrize("sizes", [(32, 32, 512), (5, 7, 19)], ids=["no-rest", "rest"])
@pytest.mark.parametrize("function", [norms, softmax, transposed])
def test_the_same(function: Any, sizes: tuple[int, int, int]) -> None:
    batch, width, length = sizes
    torch.manual_seed(0)
    inputs = (torch.rand(batch, width, width), torch.randn(batch, length))
    want, _ = compiled(function, inputs, contextlib.nullcontext)
    found, _ = compiled(function, inputs, written_once)
    assert all(torch.equal(f, w) for f, w in zip(found, want, strict=True))
    assert all(torch.allclose(f, w, atol=1e-5) for f, w in zip(found, function(*inputs), strict=True))


def test_loops_that_are_not_merged_are_written_once() -> None:
    inputs = (torch.rand(32, 32, 32), torch.randn(32, 512))
    _, twice = compiled(norms, inputs, contextlib.nullcontext)
    _, once = compiled(norms, inputs, written_once)
    assert once["nests"] * 2 == twice["nests"]


def test_rests_are_written_where_there_are_some() -> None:
    def vectorized(n: int, context: Any) -> int:
        return compiled(softmax, (torch.rand(5, n, n), torch.randn(5, 2 * n)), context)[1]["kernels"]

    assert vectorized(32, written_once) < vectorized(32, contextlib.nullcontext)
    assert vectorized(33, written_once) == vectorized(33, contextlib.nullcontext)
