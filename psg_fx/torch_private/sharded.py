"""Models that are spread over processes: which ones, and a fully sharded one with its parameters whole for a while.

Nothing of torch.distributed is imported before the user has: a model that is spread over processes shows that it is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

_TENSOR, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"
_COMMUNICATING = (_TENSOR, _FSDP, "torch.distributed._composable.replicate", "torch.distributed._composable.fsdp")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def is_sharded_tensor(value: object) -> bool:
    """Whether a tensor is a DTensor, of which this process may hold a part only."""
    found = sys.modules.get(_TENSOR)
    return found is not None and isinstance(value, found.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    kind = getattr(sys.modules.get(_FSDP), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_sharded(model: object) -> bool:
    """Whether `fully_shard` was applied to a model, or to a part of it."""
    return isinstance(model, nn.Module) and any(map(is_fully_sharded, model.modules()))


def reshard(model: nn.Module) -> None:
    """Let go of the whole parameters that forward passes have left in a model under `fully_shard`."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def wrapper(module: nn.Module) -> str:
    """The name of a class of torch that wraps a model for several processes or devices, "" of any other module."""
    kind = type(module)
    names = [k.__name__ for k in kind.__mro__ if k.__module__.startswith(("torch.nn.parallel", _FSDP))]
    return next((name for name in _WRAPPERS if name in names), "")


def hook_of_processes(module: nn.Module) -> str:
    """The name of a forward hook of torch.distributed on the module that communicates; "" if there is none.  Those of
    activation checkpointing do not.
    """
    return next(map(name_of_hook, hooks_from(module, _COMMUNICATING)), "")


def hooks_from(module: nn.Module, packages: str | tuple[str, ...]) -> Iterator[Any]:
    """The forward pre-hooks and hooks on the module itself that are code of these packages."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return (hook for hook in hooks if is_from(hook, packages))


def is_from(hook: Any, packages: str | tuple[str, ...]) -> bool:
    """Whether a hook is code of these packages."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(inner, "__module__", "")).startswith(packages)


def name_of_hook(hook: Any) -> str:
    """The name of the function, or of the class, that a hook is."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


@dataclass
class CastInputs:
    """A forward pre-hook: what fully_shard's own does to the values, the cast of the mixed-precision policy."""

    dtype: torch.dtype | None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.dtype is None else _cast((args, kwargs), self.dtype)


@dataclass
class CastOutputs:
    """A forward hook: the same of the outputs."""

    dtype: torch.dtype | None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self.dtype is None else _cast(output, self.dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)


@dataclass
class _Dressed:
    """A module under fully_shard, and what it is without: its class, hooks and methods that cast and do not gather, and
    no state of fully_shard's among its attributes, which other code may read and which changes from call to call.
    """

    module: Any
    kind: type
    plain: type
    called: list[tuple[dict[Any, Any], Any, Any, Any]] = field(default_factory=list)
    states: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)


class Sharding:
    """The modules of a model to which `fully_shard` was applied.

    `whole()` gives the model as it was before: parameters gathered, and neither hooks nor classes of fully_shard.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._dressed = [_dressed(m) for m in model.modules() if is_fully_sharded(m)]
        self._saving: list[tuple[dict[int, Any], int, Any]] = []
        self._depth = 0

    def __bool__(self) -> bool:
        return bool(self._dressed)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Every process takes part.  It may be entered while it is open."""
        self._depth += 1
        try:
            if self._depth == 1:
                self._gather()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._release()

    @torch.inference_mode(False)  # what is gathered first is written again later
    def _gather(self) -> None:
        reshard(self._model)  # what a forward pass has left gathered may be older than the shards
        for one in self._dressed:
            one.module.unshard()
        for one in self._dressed:
            one.module.__class__ = one.plain
            for held, key, _, cast in one.called:
                held[key] = cast
            for held, key, _ in one.states:
                held.pop(key, None)
        self._saving = [found for module in self._model.modules() for found in _saving(module)]
        for held, key, _ in self._saving:
            held[key] = _nothing

    @torch.inference_mode(False)
    def _release(self) -> None:
        for held, key, hook in self._saving:
            held[key] = hook
        for one in self._dressed:
            one.module.__class__ = one.kind
            for held, key, own, _ in one.called:
                held[key] = own
            for held, key, state in one.states:
                held[key] = state
        for one in self._dressed:
            one.module.reshard()


def _dressed(module: Any) -> _Dressed:
    kind = type(module)
    found = _Dressed(module, kind, kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)])
    policy = module._get_fsdp_state()._mp_policy
    inputs = CastInputs(policy.param_dtype if policy.cast_forward_inputs else None)
    outputs = CastOutputs(policy.output_dtype)
    for hooks, cast in ((module._forward_pre_hooks, inputs), (module._forward_hooks, outputs)):
        for key, own in hooks.items():
            if is_from(own, _FSDP):
                found.called.append((hooks, key, own, cast))
    for name, own in vars(module).items():
        if (method := _registered(own)) is not None:
            casting = functools.partial(_with_casts, module, method, inputs, outputs)
            found.called.append((vars(module), name, own, casting))
    for held in (value for name, value in vars(module).items() if name.startswith("__composable_api_state_key")):
        found.states += [(held, key, s) for key, s in held.items() if type(s).__module__.startswith(_FSDP)]
    return found


def _saving(module: nn.Module) -> list[tuple[dict[int, Any], int, Any]]:
    """Hooks that shard parameters where the code asks for a `state_dict`."""
    held: Any = module._state_dict_pre_hooks
    return [(held, key, hook) for key, hook in held.items() if is_from(hook, _FSDP)]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Parameters are whole for a while."""


def _registered(method: Any) -> Any:
    """What `register_fsdp_forward_method` has wrapped; None for anything else."""
    if not isinstance(method, MethodType) or not method.__func__.__globals__["__name__"].startswith(_FSDP):
        return None
    return getattr(method, "__wrapped__", None)


def _with_casts(
    module: nn.Module, method: Callable[..., Any], before: CastInputs, after: CastOutputs, *args: Any, **kwargs: Any
) -> Any:
    if (given := before(module, args, kwargs)) is not None:
        args, kwargs = given
    output = method(*args, **kwargs)
    cast = after(module, args, output)
    return output if cast is None else cast
