"""Where export is told otherwise: attributes, checkpoints, lines."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._functorch import vmap as batching
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.fx import Tracer
from torch.fx.proxy import TracerBase
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.utils import checkpoint as checkpointing

from psg_fx.source import is_library
from psg_fx.torch_private.modes import without_functions
from psg_fx.torch_private.patching import patched_here, wrapped_here


def own_attributes() -> contextlib.AbstractContextManager[None]:
    """Let export leave attributes of modules alone: it would replace containers in them by copies, warn of tensors that
    are stored there, and put numbers back.
    """
    from torch.export import _trace

    return wrapped_here(_trace, "_detect_attribute_assignment", lambda _: lambda module: contextlib.nullcontext())


@contextlib.contextmanager
def modules_named_once() -> Iterator[None]:
    """While open, the buffers of a module that has two names have the first: export would take them for two that share
    memory, into which it cannot write.
    """

    def named(self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        modules = self.named_modules(prefix=prefix) if recurse else [(prefix, self)]
        found = ((f"{at}.{name}" if at else name, t) for at, m in modules for name, t in m._buffers.items())
        seen: set[int] = set()
        for name, tensor in found:
            if tensor is None or tensor.layout is not torch.strided:
                continue
            if not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield name, tensor

    with patched_here(nn.Module, "named_buffers", named):
        yield


def dims_of_vmap() -> contextlib.AbstractContextManager[None]:
    """While open, `vmap(out_dims=d)` moves the dim by an op of its own: what torch's does in one, export takes for a
    constant, unless its inputs have their dim elsewhere, too.
    """

    def made(remove: Callable[..., Any]) -> Callable[..., Any]:
        def removed(tensor: Any, level: int, size: Any, dim: int) -> Any:
            found = remove(tensor, level, size, 0)
            with without_functions():
                return found.movedim(0, dim) if dim else found

        return removed

    return wrapped_here(batching, "_remove_batch_dim", made)


def calls_that_fail() -> contextlib.AbstractContextManager[None]:
    """While open, the tracer forgets which module it was in when a call of it raises: code that catches that
    (`except TypeError: layer(x)`) goes on where it was.
    """

    def made(call_module: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            depth = len(self.module_stack)
            try:
                return call_module(self, *args, **kwargs)
            except BaseException:
                while len(self.module_stack) > depth:
                    self.module_stack.popitem()
                raise

        return call

    return wrapped_here(Tracer, "call_module", made)


@contextlib.contextmanager
def questions_unseen() -> Iterator[None]:
    """While open, what torch asks of tensors to make fake ones of them, and of graphs that it has recorded, passes no
    mode of functions: every question would call Python for each of them, and of a hundred all but two are torch's own.
    """
    from torch.export import _trace

    def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with without_functions():
                return function(*args, **kwargs)

        return run

    with (
        wrapped_here(FakeTensorConverter, "from_real_tensor", unseen),
        wrapped_here(_trace, "_produce_aten_artifact", unseen),
    ):
        yield


def own_builtins() -> contextlib.AbstractContextManager[None]:
    """Let export leave `min` and `max` alone, where what is exported is a graph: replaced by those of symbolic sizes,
    they are also what torch's own rules for strides call, and the stride `min(16, 16*B)` of a view stays as it is
    written.  Whether that is 16 is then asked in a guard, which export does not prove.
    """
    from torch.export import _trace

    return wrapped_here(_trace, "_override_builtin_ops", lambda _: contextlib.nullcontext)


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Let `torch.utils.checkpoint.checkpoint(use_reentrant=False)` run its block as it is: an exported graph of nested
    ones has lost where gradients are enabled again.
    """

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    name = "_checkpoint_without_reentrant_generator"
    with (
        wrapped_here(checkpointing, name, lambda _: nothing),
        wrapped_here(checkpointing, f"{name}_impl", lambda _: nothing),  # since torch 2.15
    ):
        yield


def without_reentrant_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Let `checkpoint(use_reentrant=True)` run its block as it is: what is recomputed is decided after differentiation,
    and torch gives its parameters no gradient where none of its inputs has one.
    """

    def block(cls: Any, block: Any, preserve: bool, *given: Any) -> Any:
        return block(*given)

    return patched_here(checkpointing.CheckpointFunction, "apply", classmethod(block))


def user_stack_traces(caller: CodeType) -> contextlib.AbstractContextManager[None]:
    """Let traced nodes keep every frame inside `caller`, the code that calls model and loss: export's tracer keeps only
    those of functions named `forward`, so that nothing in a loss function or a helper has a line.
    """
    of_caller = (caller.co_filename, caller.co_name)

    def inner_frames(self: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        start = next((i for i, f in enumerate(summary) if (f.filename, f.name) == of_caller), len(summary))
        program, own = summary[start : start + 1], summary[start + 1 :]
        return traceback.StackSummary.from_list(program + [f for f in own if not is_library(f.filename)])

    return wrapped_here(TracerBase, "_filter_traceback_frames", lambda _: inner_frames)
