"""The modes and levels that a call of torch runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import TransformType
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._functorch import vmap as _vmap
from torch._functorch.pyfunctorch import VmapInterpreter, temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn.modules import module as of_modules
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from psg_fx.torch_private.patching import patched_here, seen_here

_add_batch_dim: Any = _vmap._add_batch_dim  # type: ignore[attr-defined]

no_modes = _disable_current_modes
not_recorded = disable_proxy_modes_tracing

without_functions: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""While open, a question to a tensor (`t.requires_grad`) passes no mode of functions: each would call Python for it."""


below_autograd: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd
"""While open, an op runs as if autograd were not there: for an op that autograd has called."""

NO_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class of tensors that says that it has none."""


def reading(name: str) -> Any:
    """What a mode of functions is told where an attribute of a tensor is read."""
    return vars(torch._C.TensorBase)[name].__get__


GRAD_OF_TENSOR = reading("grad")

IS_ALL_TRUE: Any = torch.Tensor._is_all_true
CHECK_ALL: CodeType = torch._check_tensor_all_with.__code__
"""What `torch._check_tensor_all` asks a tensor for, and the code that does."""

ASSERT_LATER: Any = torch._assert_async
"""An assertion that a device checks when it gets there."""

FILE_OF_TENSORS: str = torch._tensor.__file__
"""Where the methods of tensors are that Python has."""


class no_grad:
    """`torch.no_grad()` in a fifth of its time, which small steps notice; no decorator."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


@contextlib.contextmanager
def grad_mode_unseen(enabled: bool) -> Iterator[None]:
    """`torch.set_grad_enabled(enabled)` that no mode of functions sees: no trace records it."""
    before = torch.is_grad_enabled()
    with without_functions():
        torch._C._set_grad_enabled(enabled)
    try:
        yield
    finally:
        with without_functions():
            torch._C._set_grad_enabled(before)


is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of a transformation of `torch.func`."""


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of forward-mode AD (`torch.autograd.forward_ad.make_dual`)."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that all transformations of `torch.func` around this one hold: under `vmap`, all slices at once."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def sliced_by_vmaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that has a slice for each of those of the running `vmap`s that are as many as a symbol says."""
    for level in torch._C._functorch.get_interpreter_stack() or ():
        if level.key() == TransformType.Vmap and level.level() > torch._C._functorch.maybe_get_level(tensor):
            count: Any = VmapInterpreter(level).batch_size()
            if isinstance(count, torch.SymInt):
                slices = tensor.unsqueeze(0).expand(count, *tensor.shape)
                tensor = _add_batch_dim(slices, 0, level.level())
    return tensor


@contextlib.contextmanager
def no_functorch_levels() -> Iterator[None]:
    """Outside of all transformations of `torch.func` for a while."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


@contextlib.contextmanager
def levels_left_as_found() -> Iterator[None]:
    """What raises meanwhile leaves no transformation of `torch.func` open, as a graph does that is run node by node."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()
        raise


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
def no_saved_tensor_hooks() -> Iterator[None]:
    """Without the hooks through which autograd keeps tensors (`torch.autograd.graph.saved_tensors_hooks`; those of
    `torch.utils.checkpoint`) for a while.
    """
    taken: list[tuple[Any, Any]] = []
    top: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
    while (hooks := top(True)) is not None:
        taken.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


@contextlib.contextmanager
def no_cached_parametrizations() -> Iterator[None]:
    """Without the values that `torch.nn.utils.parametrize.cached()` keeps for a while, and without keeping any."""
    depth = parametrize._cache_enabled
    parametrize._cache_enabled -= depth
    try:
        yield
    finally:
        parametrize._cache_enabled += depth


@contextlib.contextmanager
def no_module_tracker() -> Iterator[None]:
    """Without the hooks by which `torch.utils.module_tracker` follows all modules, as `FlopCounterMode` does, for a
    while: they change no value, and put other hooks on gradients.
    """
    taken = []
    for hooks in (of_modules._global_forward_pre_hooks, of_modules._global_forward_hooks):
        for key in [k for k, hook in hooks.items() if hook.__module__ == _TRACKER]:
            taken.append((hooks, key, hooks.pop(key)))
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


_TRACKER = "torch.utils.module_tracker"


def hooks_of_all_modules() -> list[Any]:
    """Those of `register_module_forward_hook` and the like."""
    groups = (of_modules._global_forward_pre_hooks, of_modules._global_forward_hooks)
    return [hook for hooks in groups for hook in hooks.values()]


@contextlib.contextmanager
def no_hooks_of_ours() -> Iterator[None]:
    """While open, hooks of all modules run for the user's, and not for those that a capture puts around them."""
    if not hooks_of_all_modules():
        yield
        return
    own = seen_here(nn.Module, "_call_impl")

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = type(self).__module__.startswith(_OURS)
        return self.forward(*args, **kwargs) if ours else own(self, *args, **kwargs)

    with patched_here(nn.Module, "_call_impl", call):
        yield


_OURS = ("psg_fx.program", "torch.export", "torch.fx", "torch._functorch")


def default_device() -> torch.device:
    """`torch.get_default_device()`, which a mode of functions says if it is another than the CPU."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


_CPU = torch.device("cpu")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast casts to there; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def autocast_now() -> dict[str, torch.dtype]:
    """Of each type of device with autocast, what it casts to."""
    return {kind: dtype for kind in ("cpu", "cuda") if (dtype := autocast_dtype(kind)) is not None}


@contextlib.contextmanager
def autocast_unseen(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Autocast of these types of devices to these dtypes, and of no others, that no mode of functions sees."""
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        for kind in ("cpu", "cuda"):
            torch.set_autocast_enabled(kind, kind in dtypes)
            torch.set_autocast_dtype(kind, dtypes.get(kind, before[kind][1]))
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for kind, (enabled, dtype) in before.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def indexing_by_places() -> type[TorchFunctionMode]:
    """The mode in which masks of attention index tensors by numbers of places under `torch.vmap`."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # slow to import

    return TransformGetItemToIndex


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A question in C++ to that many tensors: have they the types, dtypes, devices, sizes, strides and `requires_grad`
    of these?  Of modes it depends on inference mode, so each has a guard of its own.
    """
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
