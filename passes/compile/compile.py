"""compile: a lowered graph becomes a callable on flat tensors."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule

from psg_fx.blocks import Memory, Places
from psg_fx.errors import BadArgument, NotYetSupported, PsgError, first_line
from psg_fx.graph import facts
from psg_fx.graph.history import History, PassRecord, copy_graph, log
from psg_fx.graph.stages import Stage
from psg_fx.graph.strides import free_of_strides, laid_out_as_read
from psg_fx.ops.define import begin_libraries
from psg_fx.ops.products.elsewhere import elsewhere
from psg_fx.torch_private import native
from psg_fx.torch_private.ahead import ask_ahead
from psg_fx.torch_private.compiler import compilations, inductor_modes, marked_dynamic, with_own_code
from psg_fx.torch_private.graphs import write_code
from psg_fx.torch_private.inductor import (
    Compiler,
    InductorError,
    InvalidCxxCompiler,
    calls_subgraphs,
    inductor,
    keeps_roundings,
)
from psg_fx.torch_private.mended import inductor_mended

from .calls import written_once
from .contiguous import with_contiguous_arguments
from .convolutions import convolve_elsewhere, convolves
from .joins import join_by_torch
from .prepared import erase_numbers, sizes_of, written_out
from .products import multiplies, multiply_elsewhere
from .recurrences import with_own_loops
from .sizes import Background, Flat, Sized
from .sums import add_what_is_stacked

Watch = Callable[[], AbstractContextManager[None]]
"""Opened around every compilation."""


CPU_OPTIONS = {"layout_optimization": False, "graph_partition": False}
"""Inductor's defaults that cost time on CPU: channels-last convolutions transpose activations and weights at every call
(docs/design/cpu.md; bench/calibrate.py measures it); which parts of a graph CUDA graphs can hold is asked in vain."""


def compile_graph(
    gm: GraphModule, backend: str, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None, device: str,
    memory: Memory, history: History, background: Background | None = None, own_kernels: bool = False,
    rounds: bool = False,
) -> Flat:  # fmt: skip
    """`torch.compile(gm)`; `backend="eager"` runs the graph as it is.  The user's options come before those
    of psg_fx, and these before those of the mode.  history: where compiling is recorded, whenever torch does it.
    background: compiles for inductor while the graph is run as it is.  own_kernels: whether kernels of psg_fx
    that are not part of the plan may be there, too.  rounds: values that are rounded to fewer bits stay so.
    """
    if backend == "eager":
        eager = laid_out_as_read(free_of_strides(copy_graph(gm)))
        write_code(eager)  # else its `forward` calls the module, with hooks of all modules
        return eager.forward
    gm = written_out(gm, backend, device)
    if own_kernels:
        with_own_loops(gm, device)
    with_contiguous_arguments(gm)
    numbers = erase_numbers(gm)
    if dynamic is None and _has_rows(gm):
        dynamic = True  # numbers of rows are others at every call
    if backend == "inductor":
        own = (CPU_OPTIONS if device == "cpu" else {}) | (_rounding() if rounds else {})
        options, mode = inductor_modes()[mode or "default"] | own | (options or {}), None
    watch = functools.partial(_recorded, gm, backend, history)
    run = _by_torch(gm, backend, mode, options, dynamic, watch)
    if backend == "inductor":
        replayed = device == "cuda" and bool(options and options.get("triton.cudagraphs"))
        if Sized.suits(gm):
            once = device == "cpu" and calls_subgraphs(options or {})
            compiler = _by_inductor(options or {}, watch, once, own_kernels and device == "cpu")
            meanwhile = laid_out_as_read(gm) if background else None
            run = Sized(gm, compiler, dynamic, run, replayed=replayed, background=background, meanwhile=meanwhile)
        if replayed:
            run = functools.partial(_outside_cuda_graphs, run, memory.keep)
        elif device == "cpu":
            run = functools.partial(_served, run, memory, Places())
    return functools.partial(_without, run, numbers) if numbers else run


def _rounding() -> dict[str, Any]:
    """Options by which values that are rounded stay so."""
    if not keeps_roundings():
        raise NotYetSupported(
            "the code rounds a value to fewer bits and computes with it in more", where='transform(..., '
            'backend="inductor")', why="inductor of this version of torch leaves that rounding out",
            fix='backend="eager", or a later version of torch',
        )  # fmt: skip
    return {"emulate_precision_casts": True}


def _by_torch(
    gm: GraphModule, backend: str, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None, watch: Watch
) -> Flat:  # fmt: skip
    # True would make the parameters' sizes symbols, too: the batch size is marked instead.
    by_size = None if dynamic else dynamic
    held: list[GraphModule] = []  # made when it is first run: steps for inductor hardly ever are, by torch
    called = with_own_code(lambda *tensors: held[0](*tensors))
    compiled: Flat = torch.compile(called, backend=backend, mode=mode, options=options, dynamic=by_size, fullgraph=True)

    def run(*tensors: Any) -> Sequence[Any]:
        if not held:
            held.append(laid_out_as_read(gm, again=backend != "inductor"))
        write_code(held[0])
        with contextlib.ExitStack() as open_now, compilations(
            lambda: open_now.enter_context(watch()), open_now.close
        ):  # fmt: skip
            return compiled(*tensors)

    return _marking(run, gm) if dynamic else run


def _by_inductor(options: dict[str, Any], watch: Watch, once: bool, not_by_blas: bool) -> Compiler:
    """once: what repeats is compiled once.  not_by_blas: whether another may multiply, where it is faster."""
    compiler = inductor(options)

    def watched(gm: GraphModule, inputs: Sequence[torch.Tensor]) -> Flat:
        try:
            with watch():
                if on_cpu := any(value.device.type == "cpu" for value in inputs):
                    ask_ahead().join()
                gm = _by_the_fastest(gm, inputs) if not_by_blas else gm
                parts = written_once(gm) if once else gm
                try:
                    return made(parts, inputs, on_cpu)
                except InductorError:
                    if parts is gm:
                        raise
                    return made(gm, inputs, on_cpu)  # calls whose operands lie otherwise from call to call
        except InductorError as error:
            raise _not_compiled(error) from error

    def made(gm: GraphModule, inputs: Sequence[torch.Tensor], on_cpu: bool) -> Flat:
        gm = join_by_torch(gm) if once else gm
        return compiler(add_what_is_stacked(gm) if on_cpu else gm, inputs)

    return watched


def _by_the_fastest(gm: GraphModule, inputs: Sequence[torch.Tensor]) -> GraphModule:
    """A graph with large products, and convolutions, by what is faster on this machine, if something is."""
    by = elsewhere(lambda op: multiplies(gm, inputs, op) or convolves(gm, op))
    return gm if by is None else convolve_elsewhere(multiply_elsewhere(gm, inputs, by), inputs, by)


def _not_compiled(error: InductorError) -> PsgError:
    if isinstance(error.inner_exception, OSError):
        return BadArgument(
            "the compiler cannot write its files", where="TORCHINDUCTOR_CACHE_DIR", why=first_line(error),
            fix="make room there, or set the variable to another folder",
        )  # fmt: skip
    other = "another version of torch may compile it"
    if isinstance(error.inner_exception, InvalidCxxCompiler):
        other = "install a C++ compiler, or name the one that there is in CXX"
    return NotYetSupported(
        "inductor fails to compile this step", where='transform(..., backend="inductor")',
        why=first_line(error) or type(error).__name__, fix=f'backend="eager" answers the same, more slowly; {other}',
    )  # fmt: skip


@contextlib.contextmanager
def _recorded(gm: GraphModule, backend: str, history: History) -> Iterator[None]:
    """A compilation is a step of the history, and is shown."""
    count, began = sum(node.op == "call_function" for node in gm.graph.nodes), time.perf_counter()
    history.progress.say(f"compiling {count} ops with {backend}")
    begin_libraries(gm)  # planning has begun already, unless the graph is another's, from disk
    try:
        with inductor_mended():
            yield
        native.finish()
    finally:
        history.progress.say("")
        seconds = time.perf_counter() - began
        history.record(PassRecord("compile", Stage.TIDIED, Stage.TIDIED, seconds, count, count))
        log.info("compiled %d ops with %s in %.1f s", count, backend, seconds)


def _marking(run: Flat, gm: GraphModule) -> Flat:
    """One graph for all batch sizes from 2 on: the sizes that follow from the batch size are marked as symbols.

    One sample is compiled for itself, since torch holds a size of 1 for a constant; so are one row and none.
    """
    shapes = [sizes_of(node) for node in facts.placeholders(gm)]
    symbolic = [[dim for dim, size in enumerate(shape) if size.free_symbols] for shape in shapes]
    place, along = next((i, dim) for i, dims in enumerate(symbolic) for dim in dims if shapes[i][dim].is_Symbol)
    rows = _has_rows(gm)

    def marking(*values: Any) -> Sequence[Any]:
        if not rows and values[place].shape[along] == 1:
            return run(*values)
        large = [[d for d in dims if v.shape[d] > 1] for v, dims in zip(values, symbolic, strict=True)]
        return run(*(marked_dynamic(v, dims) if dims else v for v, dims in zip(values, large, strict=True)))

    return marking


def _has_rows(gm: GraphModule) -> bool:
    """Whether some inputs hold rows of samples; halves of a step, which have no facts, do not."""
    return facts.KEY in gm.meta and bool(facts.graph_facts(gm).rows)


def _without(run: Flat, places: frozenset[int], *values: Any) -> Sequence[Any]:
    """The results for all values but those in these places."""
    return run(*[value for i, value in enumerate(values) if i not in places])


def _outside_cuda_graphs(run: Flat, until_next_call: bool, *tensors: Any) -> Sequence[Any]:
    """A CUDA graph writes its results to the same place at every call: they are copied out of its memory, unless they
    need to live only until the next call.
    """
    torch.compiler.cudagraph_mark_step_begin()
    results = run(*tensors)
    return results if until_next_call else _copies(results)


def _copies(results: Sequence[Any]) -> list[Any]:
    """Tensors in memory of their own, all of a dtype copied at once: each launch takes the host longer than a small
    copy.  One of another dtype or layout among them, and torch would copy every tensor by itself.
    """
    found = [torch.empty_like(r) if isinstance(r, torch.Tensor) else r for r in results]
    alike: dict[object, list[int]] = {}
    for i, r in enumerate(results):
        if isinstance(r, torch.Tensor):
            alike.setdefault((r.dtype, r.stride() == found[i].stride()), []).append(i)
    for places in alike.values():
        torch._foreach_copy_([found[i] for i in places], [results[i] for i in places])
    return found


def _served(run: Flat, memory: Memory, places: Places, *tensors: Any) -> Sequence[Any]:
    """The results, in memory that is used again."""
    with memory.serving(places):
        results = run(*tensors)
    memory.served(places, results)
    return results
