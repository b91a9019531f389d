"""Large products of float32 by a matrix unit, by oneDNN and in C++ are those of the BLAS; all others are left alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import psg_fx
from psg_fx import zoo
from psg_fx.ops.products import by_onednn as onednn
from psg_fx.ops.products import elsewhere, in_parts, products_here, trials
from psg_fx.passes.compile import compile as compiling
from psg_fx.passes.compile import products
from psg_fx.passes.compile.products import LEAST, multiply_elsewhere
from psg_fx.torch_private import matrix_unit, native
from psg_fx.torch_private.fakes import symbolic_inputs
from psg_fx.torch_private.tracer import trace_fakes
from support import oracle
from support.selection import one_in

aten = torch.ops.aten
HERE = torch.ops.psg_fx.products_here.default
ROWS = int(LEAST[onednn.by_onednn][0]) // (2 * 64 * 48) + 1
"""Rows of [.., 64] that, multiplied by [64, 48], are just worth calling oneDNN."""

WAYS = {"onednn": onednn.by_onednn, "parts": in_parts.in_parts}
"""Of products of two matrices; where there is no matrix unit, its op is torch's own."""

Function = Callable[..., Tensor]
CASES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(ROWS, 64), (64, 48)]),
    "turned right": (lambda a, b: a @ b.t(), [(ROWS, 64), (48, 64)]),
    "turned left": (lambda a, b: a.t() @ b, [(ROWS, 64), (ROWS, 48)]),
    "gaps": (lambda a, b: a[:, 3:67] @ b[:, 1:49], [(ROWS, 70), (64, 50)]),
    "by itself": (lambda a: a @ a, [(256, 256)]),
    "bias": (lambda a, b, c: torch.addmm(c, a, b), [(ROWS, 64), (64, 48), (48,)]),
    "samples, one for all": (lambda a, b: torch.bmm(a, b.expand(4, 64, 48)), [(4, ROWS, 64), (64, 48)]),
    "samples by each other, one for all": (
        lambda a, b: torch.bmm(a.transpose(0, 1), b.expand(6, 64, 48)), [(ROWS, 6, 64), (64, 48)],
    ),
}  # fmt: skip
OF_SAMPLES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "samples": (torch.bmm, [(4, ROWS, 64), (4, 64, 48)]),
    "samples, turned": (lambda a, b: torch.bmm(a.mT, b.mT), [(4, 64, ROWS), (4, 48, 64)]),
}
LEFT: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "small": (torch.mm, [(ROWS - 2, 64), (64, 48)]),
    "wider": (lambda a, b: (a.double() @ b.double()).float(), [(ROWS, 64), (64, 48)]),
    "scaled": (lambda a, b, c: torch.addmm(c, a, b, alpha=2), [(ROWS, 64), (64, 48), (48,)]),
    "a matrix is added": (lambda a, b, c: torch.addmm(c, a, b), [(ROWS, 64), (64, 48), (ROWS, 48)]),
    "a number is added": (lambda a, b, c: torch.addmm(c.expand(48), a, b), [(ROWS, 64), (64, 48), (1,)]),
    "few columns": (torch.bmm, [(4, ROWS, 256), (4, 256, 31)]),
    "few rows": (torch.bmm, [(40, 7, 256), (40, 256, 256)]),
}


def traced(function: Function, shapes: list[tuple[int, ...]], mode: str = "fake") -> tuple[GraphModule, list[Tensor]]:
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes)]
    return make_fx(function, tracing_mode=mode)(*inputs), inputs


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit multiplies what is worth calling oneDNN."""
    monkeypatch.setitem(products.LEAST, in_parts.in_parts, products.LEAST[onednn.by_onednn])


@pytest.fixture
def compiled() -> None:
    native.begin(products_here.LIBRARY)
    native.begin(in_parts.LIBRARY)
    native.finish()


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("name", [*CASES, *OF_SAMPLES])
def test_products(name: str, by: str, compiled: None, any_size: None) -> None:
    """Samples' matrices are left to the BLAS where it is at home, beside a unit."""
    function, shapes = (CASES | OF_SAMPLES)[name]
    gm, inputs = traced(function, shapes)
    before = targets(gm)
    found = multiply_elsewhere(gm, inputs, WAYS[by])
    assert targets(gm) == before
    if name in OF_SAMPLES and by == "parts":
        assert found is gm
        return
    found.graph.lint()
    assert (HERE if name in OF_SAMPLES else WAYS[by]) in targets(found)
    assert not {aten.mm.default, aten.addmm.default, aten.bmm.default} & set(targets(found))
    exact = function(*(value.double() for value in inputs))
    torch.testing.assert_close(found(*inputs).double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    gm, inputs = traced(*LEFT[name])
    assert multiply_elsewhere(gm, inputs, onednn.by_onednn) is gm


@pytest.mark.parametrize(
    ("shapes", "taken"),
    [
        ([(1024, 256), (256, 256)], True), ([(1040, 192), (192, 192)], True), ([(256, 256), (256, 256)], False),
        ([(64, 9216), (9216, 128)], False), ([(1024, 32), (32, 1024)], False),
        ([(8, 128, 256), (256, 256)], True), ([(8, 16, 256), (256, 256)], False),
    ],
)  # fmt: skip
def test_what_is_worth_packing(shapes: list[tuple[int, ...]], taken: bool) -> None:
    """A unit takes what is large, and of which each number is multiplied often."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b.expand(len(a), *b.shape)) if a.ndim == 3 else torch.mm(a, b)

    gm, inputs = traced(multiply, shapes)
    assert (multiply_elsewhere(gm, inputs, in_parts.in_parts) is not gm) == taken


def test_sizes_are_those_of_the_call(any_size: None) -> None:
    """A graph for every size is judged by what it is compiled for, not by what it was traced with."""
    gm, _ = traced(torch.mm, [(5, 64), (64, 48)], "symbolic")
    assert multiply_elsewhere(gm, [torch.empty(6, 64), torch.empty(64, 48)], in_parts.in_parts) is gm
    large = [torch.randn(ROWS, 64), torch.randn(64, 48)]
    found = multiply_elsewhere(gm, large, in_parts.in_parts)
    assert in_parts.in_parts in targets(found)
    torch.testing.assert_close(found(*large), torch.mm(*large), rtol=1e-5, atol=1e-4)


def test_one_matrix_for_any_number_of_samples(any_size: None) -> None:
    """As an LSTM multiplies `[T, B, I]`, which is `[B, T, I]` in memory, by its weight."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), w.t().expand(x.shape[1], *w.t().shape))

    gm = trace_fakes(run, symbolic_inputs([torch.randn(5, 6, 64), torch.randn(48, 64)], [0, None]))
    large = [torch.randn(ROWS, 6, 64), torch.randn(48, 64)]
    found = multiply_elsewhere(gm, large, in_parts.in_parts)
    assert in_parts.in_parts in targets(found)
    exact = run(*(value.double() for value in large))
    torch.testing.assert_close(found(*large).double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., float]]:
    """`times_as_fast` in a folder of its own, forgotten at the next call as in a new process, told: the seconds of the
    BLAS and of the other in turns, and how much of its time the process was given.
    """

    def times_as_fast(seconds: Sequence[float] = (), given: float = 1.0, threads: int = 1, code: str = "") -> float:
        trials.times_as_fast.cache_clear()
        left = list(seconds)
        with monkeypatch.context() as patch:
            patch.setattr(trials.caches, "folder", lambda: tmp_path)
            patch.setattr(trials, "_seconds", lambda multiply, a, b: left.pop(0))
            clock = itertools.count()
            patch.setattr(trials.time, "perf_counter", lambda: next(clock))
            worked = itertools.count(0, given * threads)
            patch.setattr(trials.time, "process_time", lambda: next(worked))
            return trials.times_as_fast("way", torch.mm, 4, len(seconds) // 2 - 1, threads, code)

    yield times_as_fast
    trials.times_as_fast.cache_clear()


def test_a_trial_is_kept(trial: Callable[..., float]) -> None:
    """The median of pairs, without the first; who is asked later, with as many threads and the same code, is told the
    same.
    """
    assert trial([9, 1, 3, 2, 8, 2, 4, 2]) == 2.0
    assert trial() == 2.0
    assert trial([1, 1, 3, 1], threads=2) == 3.0
    assert trial([1, 1, 4, 1], code="void another();") == 4.0
    assert trial() == 2.0


def test_a_trial_that_was_disturbed_is_not_kept(trial: Callable[..., float]) -> None:
    assert trial([1, 1, 3, 1], given=0.5) == 3.0
    assert trial([1, 1, 1, 1]) == 1.0
    assert trial() == 1.0


def test_a_file_that_says_nothing(trial: Callable[..., float], tmp_path: Path) -> None:
    assert trial([1, 1, 1, 1]) == 1.0
    (path,) = (tmp_path / "psg_fx" / "trials").iterdir()
    path.write_text("?")
    assert trial([1, 1, 4, 1]) == 4.0


def test_a_trial_leaves_nothing() -> None:
    """The user's threads and generator are as they were, and another default dtype is no trouble."""
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        found, given = trials._tried(torch.mm, 4, 2, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert min(found, given) > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), before)


def test_threads_that_begin_during_a_trial_have_the_number_that_is_set(two_threads: None) -> None:
    """One with one thread tells nobody else so."""
    seen: list[tuple[int, int]] = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as users:
            seen.append((torch.get_num_threads(), users.submit(torch.get_num_threads).result()))
        return torch.mm(a, b)

    trials._tried(multiply, 4, 2, 1)
    trials._tried(multiply, 4, 2, 2)
    assert seen == [(1, 2)] * 3 + [(2, 2)] * 3
    assert torch.get_num_threads() == 2


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("by", one_in(3, [*WAYS, None]))
def test_a_step(by: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer whose products are all somewhere else, at two batch sizes, or where torch has them."""
    made: list[Any] = []
    original = products.multiply_elsewhere

    def noted(gm: GraphModule, inputs: Any, by: Any) -> GraphModule:
        found = original(gm, inputs, by)
        made.append(targets(found))
        return found

    monkeypatch.setattr(products, "LEAST", dict.fromkeys(WAYS.values(), (0, 0)))
    monkeypatch.setattr(compiling, "multiply_elsewhere", noted)
    monkeypatch.setattr(compiling, "elsewhere", lambda is_wanted: by and WAYS[by])
    ex = zoo.example("gpt", batch=4, layers=1, width=32, heads=2, tokens=8, vocabulary=50)
    step = psg_fx.transform(ex.model, ex.loss_fn, quantities=[psg_fx.Norms(), psg_fx.ClippedSum(max_norm=0.1)])
    for size in (4, 3):
        out = step(ex.inputs[:size], ex.targets[:size])
        _, grads = oracle.loop_grads(ex.model, ex.loss_fn, ex.inputs[:size], ex.targets[:size])
        assert oracle.relative_error(out.norms, oracle.norms(grads)) < 1e-5
        assert oracle.worst_error(out.clipped_sum, oracle.clipped_sum(grads, 0.1)) < 1e-5
    assert bool(made) == bool(by)
    assert all(WAYS[by or ""] in ops and aten.mm.default not in ops for ops in made)


@pytest.mark.parametrize(
    ("wanted", "worth", "found"), [("ab", "ab", "a"), ("ab", "b", "b"), ("b", "ab", "b"), ("a", "b", None)]
)
def test_which_it_is(wanted: str, worth: str, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that has something to do and is worth it; what has nothing to do is not tried."""
    asked: list[str] = []
    ways = {op: lambda op=op: asked.append(op) or op in worth for op in "ab"}
    monkeypatch.setattr(elsewhere, "WAYS", ways)
    assert elsewhere.elsewhere(lambda op: op in wanted) == found
    assert set(asked) <= set(wanted)


def test_what_a_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried."""
    monkeypatch.setattr(in_parts, "has_matrix_unit", lambda: False)
    monkeypatch.setattr(onednn.onednn, "has_onednn", lambda: False)
    for module in (in_parts, onednn):
        monkeypatch.setattr(module, "is_faster", lambda *args, **kwargs: pytest.fail("it was tried"))
        assert not module.is_worth_it()


@pytest.mark.parametrize(("precision", "left"), [("highest", False), ("high", False), ("medium", True)])
def test_where_the_user_lets_torch_round(precision: str, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then torch multiplies in bfloat16, faster than anybody who is exact."""
    monkeypatch.setattr(elsewhere, "WAYS", {in_parts.in_parts: lambda: True})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert (elsewhere.elsewhere(lambda op: True) is None) == left
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_unit_that_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that the user forbids, no unit, one that knows no bfloat16, a system that refuses."""
    has = matrix_unit.has_matrix_unit.__wrapped__
    allowed = {"get_cpu_capability": lambda: "AVX512"}
    there = {
        "_is_amx_tile_supported": lambda: True,
        "_init_amx": lambda: True,
        "get_capabilities": lambda: {"amx_bf16": True},
    }
    for what, instead in {
        "get_cpu_capability": lambda: "AVX2", "_is_amx_tile_supported": lambda: False,
        "get_capabilities": lambda: {"amx_bf16": False}, "_init_amx": lambda: False, "": None,
    }.items():  # fmt: skip
        with monkeypatch.context() as patch:
            for name, value in (allowed | there | ({what: instead} if what else {})).items():
                where = torch.backends.cpu if name in allowed else torch.cpu
                patch.setattr(where, name, value, raising=False)
            assert has() == (not what)
