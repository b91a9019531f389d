"""Every private torch API that psg_fx uses, in one place, with what it is for."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.callback import callback_handler
from torch._dynamo.source import ConstantSource
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.effects import has_effects
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.proxy import TracerBase
from torch.fx.traceback import preserve_node_meta
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _disable_current_modes as no_modes

from psg_fx.source import is_library
from psg_fx.torch_private.patching import patched_here

aten = torch.ops.aten

__all__ = [
    "allocating",
    "autocast_key",
    "compilations",
    "core_decompositions",
    "custom_op_name",
    "empty_strided_cpu",
    "enable_python_dispatcher",
    "fake_batch",
    "has_effect",
    "has_known_value",
    "inductor_modes",
    "marked_dynamic",
    "module_without_code",
    "no_function_modes",
    "no_functorch_levels",
    "no_modes",
    "own_attributes",
    "partition",
    "preserve_node_meta",
    "python_decomposition",
    "symbolic_inputs",
    "tensor_guards",
    "traced_without_code",
    "user_stack_traces",
    "watching_symbols",
    "without_checkpoints",
    "without_fake_cache",
    "without_functions",
]


@functools.cache
def core_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Torch's decompositions into core ATen ops."""
    return dict(core_aten_decompositions())


def python_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """What computes a composite op by others: its composite kernel, or a function from torch's table."""
    if op._can_decompose():
        return op.decompose
    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found


def custom_op_name(op: object) -> str | None:
    """`mylib::myop` of what `torch.library.custom_op` returns; None of anything else."""
    return op._qualname if isinstance(op, CustomOpDef) else None


def has_effect(op: OpOverload) -> bool:
    """Whether an op is registered as one that does something beside computing its result."""
    arguments: tuple[Any, ...] = (op, (), {})[
        : len(inspect.signature(has_effects).parameters)
    ]  # of the op alone since torch 2.10
    return bool(has_effects(*arguments))


@contextlib.contextmanager
def compilations(started: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """While open, these are called before and after all that torch compiles in this thread."""
    thread = threading.get_ident()

    def first(_: object) -> None:
        if threading.get_ident() == thread:
            started()

    def last(_: object) -> None:
        if threading.get_ident() == thread:
            ended()

    callback_handler.register_start_callback(first)
    callback_handler.register_end_callback(last)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # `torch._dynamo.reset()` forgets them all
            callback_handler.remove_start_callback(first)
            callback_handler.remove_end_callback(last)


def module_without_code(gm: GraphModule, graph: Graph) -> GraphModule:
    """A graph module whose Python code is written when it is first asked for: most stages only hold a graph."""
    return _LazyGraphModule(dict(gm.named_children()), graph, type(gm).__name__)


def traced_without_code() -> contextlib.AbstractContextManager[None]:
    """Let what is traced be such modules."""
    return _use_lazy_graph_module(True)


def without_fake_cache(value: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Run ops on fake tensors like this one without remembering their results: what is traced only once pays twice for
    the memory, because torch checks each entry when it makes it.
    """
    found: contextlib.AbstractContextManager[None] = disable_fake_tensor_cache(value.fake_mode)  # type: ignore[attr-defined]
    return found


without_functions: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""While open, a question to a tensor (`t.requires_grad`) passes no mode of functions: each would call Python for it."""


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A question in C++ to that many tensors: have they the types, dtypes, devices, sizes, strides and `requires_grad`
    of these?  Of modes it depends on inference mode, so each has a guard of its own.
    """
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@contextlib.contextmanager
def no_functorch_levels() -> Iterator[None]:
    """Outside of all transformations of `torch.func` for a while."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


@contextlib.contextmanager
def no_function_modes() -> Iterator[None]:
    """Outside of all modes that see torch's functions (`TorchFunctionMode`) for a while."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def own_attributes() -> Iterator[None]:
    """Let export leave attributes of modules alone: it would replace containers in them by copies, warn of tensors that
    are stored there, and put numbers back.
    """
    name = "_detect_attribute_assignment"
    from torch.export import _trace

    if not hasattr(_trace, name):
        yield
        return
    with patched_here(_trace, name, lambda module: contextlib.nullcontext()):
        yield


def has_known_value(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be looked at while a program is traced: it is a constant of the code."""
    if isinstance(tensor, FakeTensor):
        return tensor.constant is not None
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def fake_batch() -> Iterator[tuple[Callable[[torch.Tensor, bool], torch.Tensor], Callable[[], bool]]]:
    """A maker of fake tensors `(like, stacked)` whose first size, if stacked, is a batch size of their own, and a
    question: is that size still a symbol?
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    size = 3
    made: list[torch.Tensor] = []

    def example(like: torch.Tensor, stacked: bool) -> torch.Tensor:
        shape = [int(s) for s in like.shape[stacked:]]
        real = torch.empty([size, *shape] if stacked else shape, dtype=like.dtype, device="meta")
        dims = [DimDynamic.DUCK] * stacked + [DimDynamic.STATIC] * len(shape)
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        with mode:
            sized = mode.from_tensor(real, symbolic_context=context, source=ConstantSource(f"value_{len(made)}"))
            fake = torch.empty(sized.shape, dtype=like.dtype, device=like.device)
        made.extend([fake] if stacked else [])
        return fake

    def is_symbol() -> bool:
        sizes: list[Any] = [t.shape[0] for t in made]
        return all(isinstance(s, torch.SymInt) and not s.node.expr.is_number for s in sizes)

    yield example, is_symbol


def partition(joint: GraphModule, num_fwd_outputs: int) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph with placeholders `primals_*` and `tangents_*` into a forward and a backward graph, with the
    fewest bytes saved between them (Chen et al. 2016, arXiv:1604.06174, by min-cut).
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # slow to import, and seldom used

    forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_fwd_outputs)
    return forward, backward


def autocast_key(device_type: str) -> tuple[bool, torch.dtype] | None:
    """The autocast state that a capture depends on."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return True, torch.get_autocast_dtype(device_type)


@contextlib.contextmanager
def watching_symbols(seen: Callable[[Any, Any, FrameType], None]) -> Iterator[None]:
    """Call `seen(expression, result, frame)` whenever Python code makes a symbolic size or condition a plain one.

    `SymBool.__bool__` and `SymInt.__int__` have no hook; `frame` is that of the code that asked.
    """
    methods = [(torch.SymBool, "__bool__"), (torch.SymInt, "__int__"), (torch.SymInt, "__index__")]

    def watched(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read(self: Any) -> Any:
            expression = self.node.expr
            result = original(self)
            if getattr(expression, "free_symbols", None):
                seen(expression, result, sys._getframe(1))
            return result

        return read

    with contextlib.ExitStack() as patches:
        for kind, name in methods:
            patches.enter_context(patched_here(kind, name, watched(getattr(kind, name))))
        yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Let `torch.utils.checkpoint.checkpoint(use_reentrant=False)` run its block as it is: an exported graph of nested
    ones has lost where gradients are enabled again.
    """

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    name = "_checkpoint_without_reentrant_generator"
    with contextlib.ExitStack() as patches:
        for found in (name, f"{name}_impl"):  # the second since torch 2.15
            if hasattr(checkpointing, found):
                patches.enter_context(patched_here(checkpointing, found, nothing))
        yield


@contextlib.contextmanager
def user_stack_traces(caller: CodeType) -> Iterator[None]:
    """Let traced nodes keep every frame inside `caller`, the code that calls model and loss: export's tracer keeps only
    those of functions named `forward`, so that nothing in a loss function or a helper has a line.
    """
    of_caller = (caller.co_filename, caller.co_name)

    def inner_frames(self: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        start = next((i for i, f in enumerate(summary) if (f.filename, f.name) == of_caller), len(summary))
        program, own = summary[start : start + 1], summary[start + 1 :]
        return traceback.StackSummary.from_list(program + [f for f in own if not is_library(f.filename)])

    name = "_filter_traceback_frames"
    patch = patched_here(TracerBase, name, inner_frames) if hasattr(TracerBase, name) else contextlib.nullcontext()
    with patch:
        yield


def symbolic_inputs(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[torch.Tensor]:
    """The tensors as fake ones whose size in `dims` is one symbol; they agree on that size."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    made: list[torch.Tensor] = []
    for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        sizes = [DimDynamic.DUCK if d == dim else DimDynamic.STATIC for d in range(tensor.ndim)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        made.append(mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"value_{index}")))
    return made


Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""Size, stride, dtype -> a tensor on the CPU, not filled."""

empty_strided_cpu: Allocate = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
"""What the code generated by inductor calls for every buffer on the CPU."""

_serving = threading.local()


@contextlib.contextmanager
def allocating(take: Allocate) -> Iterator[None]:
    """Let code generated by inductor that runs in this thread take its buffers on the CPU from `take`.

    Inductor has no setting for it; where its code no longer looks as expected, buffers are allocated as ever.
    """
    _reach_generated_code()
    before = getattr(_serving, "take", None)
    _serving.take = take
    try:
        yield
    finally:
        _serving.take = before


def _empty_strided_cpu(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    take: Allocate = getattr(_serving, "take", None) or empty_strided_cpu
    return take(size, stride, dtype)


@functools.cache
def _reach_generated_code() -> None:
    """Give modules of generated code that are loaded while `allocating` is open our allocation: they call a global."""
    from torch._inductor.codecache import PyCodeCache  # what does not use inductor need not load it

    original = PyCodeCache.load_by_key_path

    def load(*args: Any, **kwargs: Any) -> Any:
        module: Any = original(*args, **kwargs)
        if getattr(_serving, "take", None) is not None and hasattr(module, "empty_strided_cpu"):
            module.empty_strided_cpu = _empty_strided_cpu
        return module

    PyCodeCache.load_by_key_path = staticmethod(load)  # type: ignore[method-assign]


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of inductor, and the options that each stands for."""
    found: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    return found


def marked_dynamic(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The tensor under another object whose sizes in `dims` `torch.compile` keeps as symbols.

    `torch.compile(dynamic=True)` would make symbols of the parameters' sizes too, which costs speed, and holds two
    sizes for the same that happen to be equal in the first call.
    """
    alias = tensor.detach()
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(alias, dim)
    return alias
