"""Inductor without `torch.compile`: a graph is compiled as it is, for sizes that are told.

`torch.compile` would trace the graph once more, and look at every argument at each call to know whether what it has
compiled still serves.  A step knows that already (`passes/compile/sizes.py`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._dynamo.eval_frame as eval_frame
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._inductor.exc import InductorError as InductorError
from torch._inductor.exc import InvalidCxxCompiler as InvalidCxxCompiler
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from psg_fx.torch_private.compiler import code_that_asks
from psg_fx.torch_private.fakes import with_symbols
from psg_fx.torch_private.functional_already import functional_already
from psg_fx.torch_private.kernel_files import few_kernel_files
from psg_fx.torch_private.patching import patched_here
from psg_fx.torch_private.repeated import without_repetition
from psg_fx.torch_private.written_once import written_once

Sizes = Mapping[sympy.Symbol, int]
Compiler = Callable[[GraphModule, Sequence[torch.Tensor]], Callable[..., Sequence[Any]]]
"""Makes code of a graph, for fake inputs."""


@dataclass(frozen=True)
class Like:
    """An input of a graph: its sizes and strides in the graph's symbols, its type and device.

    stays: whether it lies where it lay at the last call, or nearly always: CUDA graphs read it there, and are recorded
    anew where it does not; all others are copied to a place of their own at each call.
    """

    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    device: torch.device
    stays: bool = False


_OURS: list[tuple[int, str]] = []
"""The thread in which psg_fx has set torch's stance, and what it was before."""


def stance() -> str:
    """How the user wants `torch.compile` to behave (`torch.compiler.set_stance`), "force_eager" where it is off."""
    if torch._dynamo.config.disable:
        return "force_eager"
    ours = _OURS[-1:]
    found: str = ours[0][1] if ours and ours[0][0] != threading.get_ident() else eval_frame._stance.stance
    return found


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While open, what the user has compiled runs as it is written; steps in other threads run as ever."""
    _OURS.append((threading.get_ident(), stance()))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _OURS.pop()


def inductor(options: Mapping[str, Any]) -> Compiler:
    """Inductor with these options, as `torch.compile` would call it.  Raises RuntimeError for one it does not have."""
    found: Compiler = torch._TorchCompileInductorWrapper(None, dict(options), None)
    return found


def keeps_roundings() -> bool:
    """Whether it can be told to keep roundings: torch 2.11 drops one that is followed by a wider cast, all the same."""
    from torch._inductor.fx_passes import joint_graph  # slow to import, and seldom used

    return hasattr(joint_graph, "_is_lossless_fp_widening_cast")


def calls_subgraphs(options: Mapping[str, Any]) -> bool:
    """Whether what inductor writes with these options can call subgraphs: Python can, C++ cannot."""
    return not options.get("cpp_wrapper", torch._inductor.config.cpp_wrapper)


def compiled(
    compiler: Compiler, gm: GraphModule, inputs: Sequence[Like], fixed: Sizes, free: Sizes
) -> tuple[Callable[..., Sequence[Any]], Callable[[Sizes], bool]]:
    """The graph compiled, and whether what was compiled serves these sizes.

    fixed: symbols that stand for one number.  free: symbols that stay such, with a number each where the compiler
    wants to know one (at least 2).
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    values: dict[sympy.Symbol, Any] = {**fixed, **_symbols(mode, free)}
    names = {value.node.expr: symbol for symbol, value in values.items() if symbol in free}

    @functools.cache
    def value_of(size: sympy.Expr) -> Any:
        symbols = sorted(size.free_symbols, key=str)
        return sympy.lambdify(symbols, size, "math")(*(values[s] for s in symbols)) if symbols else int(size)

    with mode:
        fakes = [
            torch.empty_strided(
                [value_of(s) for s in like.shape], [value_of(s) for s in like.strides], dtype=like.dtype,
                device=like.device,
            )
            for like in inputs
        ]  # fmt: skip
    static = [place for place, like in enumerate(inputs) if like.stays]
    with (
        compile_lock, tracing(TracingContext(mode)), few_kernel_files(), without_repetition(), _in_place(static),
        code_that_asks(), functional_already(), written_once(),
    ):  # fmt: skip
        run = compiler(gm, fakes)
    # Around it torch keeps Dynamo out, as steps do, and asks at each call of a record that belongs to who traces
    run = getattr(run, "_torchdynamo_orig_callable", run)
    conditions = [guard.expr.xreplace(names) for guard in env.guards]

    def serves(sizes: Sizes) -> bool:
        return all(bool(c.subs(sizes) == sympy.true) for c in conditions)

    return run, serves


@contextlib.contextmanager
def _in_place(places: Sequence[int]) -> Iterator[None]:
    """While open, these inputs of what this thread compiles stay where they are; inductor is told by Dynamo else."""
    if not places:
        yield
        return
    from torch._inductor import compile_fx  # slow to import, and only who compiles needs it

    with patched_here(compile_fx, "get_static_input_idxs", lambda fixed: list(places)):
        yield


def _symbols(mode: FakeTensorMode, free: Sizes) -> dict[sympy.Symbol, torch.SymInt]:
    """A size of its own for each."""
    real = torch.empty(tuple(free.values()), device="meta")
    made: Any = with_symbols(mode, real, [DimDynamic.DYNAMIC] * len(free), "sizes")
    return dict(zip(free, made.shape, strict=True))
